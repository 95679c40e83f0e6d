// Kernels for AVX-512 that scripts/build_ik.py adds to ik_llama.cpp.
//
// They multiply weights that the library has repacked, several rows side by side, with the columns of a pass. Its own
// kernels for these types work on 256 bits, or read two distant places in turns, which a processor does not foresee.
// These take two groups of rows at a time, the lower half of each register for the one and the upper for the other,
// and ask for the next two while they work on these. So a pass over a few tokens waits for memory as one over a single
// token does, and costs little more.
//
// Whatever the number of columns, an output is made by the same operations in the same order. It is that of the library's
// own kernels for several columns, bit by bit.
//
// Needs iqk_common.h, ggml-common.h and ggml.h before it.

#pragma once

#ifdef HAVE_FANCY_SIMD  // AVX-512 with F, BW, DQ, VL and VNNI

namespace localspec {

// What two groups of rows hold of one block; where there is no second group it is the first again.
inline __m512i load(const void * first, const void * second) {
    const auto lower = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    return _mm512_inserti64x4(lower, _mm256_loadu_si256((const __m256i *)second), 1);
}

inline __m512i both_halves(__m256i data) { return _mm512_broadcast_i64x4(data); }

inline __m512 halves(__m256 first, __m256 second) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
}

template <int size> inline void prefetch(const void * data) {
    for (int i = 0; i < size; i += 64) _mm_prefetch((const char *)data + i, _MM_HINT_T0);
}

// Adds products of four weights of each row, and of the four values of a column that belong to them, to `sum`.
template <int which> inline __m512i add_products(__m512i sum, __m512i weights, __m512i column) {
    return _mm512_dpbusd_epi32(sum, weights, _mm512_shuffle_epi32(column, (_MM_PERM_ENUM)(0x55*which)));
}

inline __m512i add_products(__m512i sum, const __m512i * weights, __m512i column) {
    sum = add_products<0>(sum, weights[0], column);
    sum = add_products<1>(sum, weights[1], column);
    sum = add_products<2>(sum, weights[2], column);
    return add_products<3>(sum, weights[3], column);
}

// K-quants: blocks of 256 weights of four rows, in eight parts of 32. A register holds 16 sums: rows 0 to 3 over the
// first half of each part and over the second, of one group and then of the other.
constexpr int kBlock = 256;
constexpr int kParts = 8;

inline void store_k(const DataInfo & info, int row, int column, __m512 sums, bool second) {
    info.store(row, column, _mm_add_ps(_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps(sums, 1)));
    if (second) {
        info.store(row + 4, column, _mm_add_ps(_mm512_extractf32x4_ps(sums, 2), _mm512_extractf32x4_ps(sums, 3)));
    }
}

// Sixteen bytes of either group with bits for both halves of a part: those of the first half are shifted up by four.
inline __m512i split_bits(const void * first, const void * second) {
    const auto a = _mm_loadu_si128((const __m128i *)first), b = _mm_loadu_si128((const __m128i *)second);
    auto both = _mm512_castsi128_si512(_mm_slli_epi16(a, 4));
    both = _mm512_inserti32x4(both, a, 1);
    both = _mm512_inserti32x4(both, _mm_slli_epi16(b, 4), 2);
    return _mm512_inserti32x4(both, b, 3);
}

// One block of a type with a scale and a minimum of 6 bits for each part of a row.
template <typename B> struct WithMinimums {
    using Block = B;

    WithMinimums(const Block & a, const Block & b) : a(a), b(b) {
        const auto all = halves(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)a.d)),
                                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)b.d)));
        d = _mm512_shuffle_f32x4(all, all, _MM_SHUFFLE(2, 2, 0, 0));
        minus_m = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_shuffle_f32x4(all, all, _MM_SHUFFLE(3, 3, 1, 1)));
        // Four bits of each scale and minimum are in scales_l, two in scales_h.
        const auto low = _mm512_set1_epi8(0x0f), high = _mm512_set1_epi8(0x30);
        const auto four = load(a.scales_l, b.scales_l), two = split_bits(a.scales_h, b.scales_h);
        scales = _mm512_or_si512(_mm512_and_si512(four, low), _mm512_and_si512(two, high));
        mins = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(four, 4), low),
                               _mm512_and_si512(_mm512_srli_epi16(two, 2), high));
    }

    // Takes the minimums off `acc`; a column holds the sums of its parts as floats.
    template <int columns>
    void begin(const Q8<columns, block_q8_K> & y, int block, __m512 * acc, __m512i * sums) const {
        const auto parts = _mm512_shuffle_i64x2(mins, mins, _MM_SHUFFLE(3, 1, 2, 0));
        const auto l = _mm512_castsi512_si256(parts), h = _mm512_extracti64x4_epi64(parts, 1);
        const __m256i order[2] = {_mm256_unpacklo_epi32(l, h), _mm256_unpackhi_epi32(l, h)};
        __m512 c[4];
        for (int k = 0; k < 4; ++k) {
            const auto of_a = _mm256_castsi256_si128(order[k/2]), of_b = _mm256_extracti128_si256(order[k/2], 1);
            const auto bytes = k % 2 ? _mm_unpackhi_epi64(of_a, of_b) : _mm_unpacklo_epi64(of_a, of_b);
            c[k] = _mm512_mul_ps(minus_m, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
        }
        for (int iy = 0; iy < columns; ++iy) {
            const auto column = _mm512_castsi512_ps(both_halves(y.load_bsums(iy, block)));
            acc[iy] = _mm512_fmadd_ps(c[0], _mm512_permute_ps(column, 0x00), acc[iy]);
            acc[iy] = _mm512_fmadd_ps(c[1], _mm512_permute_ps(column, 0x55), acc[iy]);
            acc[iy] = _mm512_fmadd_ps(c[2], _mm512_permute_ps(column, 0xaa), acc[iy]);
            acc[iy] = _mm512_fmadd_ps(c[3], _mm512_permute_ps(column, 0xff), acc[iy]);
            sums[iy] = _mm512_setzero_si512();
        }
    }

    // Unpacks the lower four bits of part i; returns its scales.
    __m512i four_bits(int i, __m512i (&weights)[4]) const {
        const auto low = _mm512_set1_epi8(0x0f);
        const auto bits1 = load(a.qs + 64*i, b.qs + 64*i), bits2 = load(a.qs + 64*i + 32, b.qs + 64*i + 32);
        weights[0] = _mm512_and_si512(bits1, low);
        weights[1] = _mm512_and_si512(bits2, low);
        weights[2] = _mm512_and_si512(_mm512_srli_epi16(bits1, 4), low);
        weights[3] = _mm512_and_si512(_mm512_srli_epi16(bits2, 4), low);
        const auto which = _mm512_castsi128_si512(_mm_setr_epi32(i, i, i + kParts, i + kParts));
        return _mm512_cvtepi8_epi32(_mm512_castsi512_si128(_mm512_permutexvar_epi32(which, scales)));
    }

    const Block & a, & b;
    __m512 d, minus_m;
    __m512i scales, mins;
};

// One block of Q4_K_R4.
struct Q4K : WithMinimums<block_q4_k_r4> {
    using WithMinimums::WithMinimums;

    __m512i part(int i, __m512i (&weights)[4]) const { return four_bits(i, weights); }
};

// One block of Q5_K_R4: the fifth bits are in qh.
struct Q5K : WithMinimums<block_q5_k_r4> {
    using WithMinimums::WithMinimums;

    __m512i part(int i, __m512i (&weights)[4]) const {
        const auto scale = four_bits(i, weights), fifth = split_bits(a.qh + 16*i, b.qh + 16*i);
        const auto add = [](__m512i four, __m512i bits) {
            return _mm512_or_si512(four, _mm512_and_si512(bits, _mm512_set1_epi8(0x10)));
        };
        weights[0] = add(weights[0], fifth);
        weights[1] = add(weights[1], _mm512_srli_epi16(fifth, 2));
        weights[2] = add(weights[2], _mm512_srli_epi16(fifth, 1));
        weights[3] = add(weights[3], _mm512_srli_epi16(fifth, 3));
        return scale;
    }
};

// One block of Q6_K_R4: weights of 6 bits less 32, a scale of 8 bits for each half of a part.
struct Q6K {
    using Block = block_q6_k_r4;

    Q6K(const Block & a, const Block & b) : a(a), b(b) {
        const auto all = _mm512_castps256_ps512(_mm256_cvtph_ps(
            _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)a.d), _mm_loadl_epi64((const __m128i *)b.d))));
        d = _mm512_shuffle_f32x4(all, all, _MM_SHUFFLE(1, 1, 0, 0));
    }

    // Begins `sums` with what the 32 amounts to; a column holds the sums of its halves of parts.
    template <int columns>
    void begin(const Q8<columns, block_q8_K> & y, int block, __m512 *, __m512i * sums) const {
        const auto by_row = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        const auto even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        __m512i t[4];
        for (int k = 0; k < 4; ++k) {
            const auto of_a = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a.scales + k));
            const auto bytes = _mm256_inserti128_si256(of_a, _mm_loadu_si128((const __m128i *)b.scales + k), 1);
            t[k] = _mm512_mullo_epi16(_mm512_shuffle_epi8(_mm512_cvtepi8_epi16(bytes), by_row), _mm512_set1_epi16(-32));
        }
        const __m512i s[4] = {_mm512_permutex2var_epi64(t[0], even, t[2]), _mm512_permutex2var_epi64(t[0], odd, t[2]),
                              _mm512_permutex2var_epi64(t[1], even, t[3]), _mm512_permutex2var_epi64(t[1], odd, t[3])};
        for (int iy = 0; iy < columns; ++iy) {
            const auto column = both_halves(y.load_bsums(iy, block));
            auto sum = _mm512_setzero_si512();
            sum = _mm512_dpwssd_epi32(sum, s[0], _mm512_shuffle_epi32(column, (_MM_PERM_ENUM)0x00));
            sum = _mm512_dpwssd_epi32(sum, s[1], _mm512_shuffle_epi32(column, (_MM_PERM_ENUM)0x55));
            sum = _mm512_dpwssd_epi32(sum, s[2], _mm512_shuffle_epi32(column, (_MM_PERM_ENUM)0xaa));
            sums[iy] = _mm512_dpwssd_epi32(sum, s[3], _mm512_shuffle_epi32(column, (_MM_PERM_ENUM)0xff));
        }
    }

    __m512i part(int i, __m512i (&weights)[4]) const {
        const auto low = _mm512_set1_epi8(0x0f), high = _mm512_set1_epi8(0x30);
        const auto bits1 = load(a.ql + 64*i, b.ql + 64*i), bits2 = load(a.ql + 64*i + 32, b.ql + 64*i + 32);
        const auto upper = load(a.qh + 32*i, b.qh + 32*i);
        const auto join = [&](__m512i four, __m512i two) {
            return _mm512_or_si512(_mm512_and_si512(four, low), _mm512_and_si512(two, high));
        };
        weights[0] = join(bits1, _mm512_slli_epi16(upper, 4));
        weights[1] = join(bits2, upper);
        weights[2] = join(_mm512_srli_epi16(bits1, 4), _mm512_slli_epi16(upper, 2));
        weights[3] = join(_mm512_srli_epi16(bits2, 4), _mm512_srli_epi16(upper, 2));
        return _mm512_cvtepi8_epi32(_mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)(a.scales + 8*i)),
                                                       _mm_loadl_epi64((const __m128i *)(b.scales + 8*i))));
    }

    const Block & a, & b;
    __m512 d;
};

template <typename Quant, int columns>
void multiply_k(int n, const void * vx, size_t bx, const DataInfo & info, int nrc_x) {
    using Block = typename Quant::Block;
    GGML_ASSERT(nrc_x % 4 == 0);
    const Q8<columns, block_q8_K> y(info);
    for (int ix = 0; ix < nrc_x; ix += 8) {
        const bool second = ix + 4 < nrc_x;
        const auto * a = (const Block *)((const char *)vx + ix*bx);
        const auto * b = second ? (const Block *)((const char *)vx + (ix + 4)*bx) : a;
        const auto * next = (const Block *)((const char *)vx + (ix + 8)*bx);
        __m512 acc[columns];
        for (auto & sum : acc) sum = _mm512_setzero_ps();
        for (int block = 0; block < n/kBlock; ++block) {
            prefetch<2*sizeof(Block)>(next + 2*block);
            const Quant x(a[block], b[block]);
            __m512i sums[columns];
            x.begin(y, block, acc, sums);
            for (int i = 0; i < kParts; ++i) {
                __m512i weights[4];
                const auto scale = x.part(i, weights);
                for (int iy = 0; iy < columns; ++iy) {
                    const auto column = both_halves(y.load_quants(iy, block, i));
                    const auto sum = add_products(_mm512_setzero_si512(), weights, column);
                    sums[iy] = _mm512_add_epi32(sums[iy], _mm512_mullo_epi32(scale, sum));
                }
            }
            for (int iy = 0; iy < columns; ++iy) {
                const auto scale = _mm512_mul_ps(x.d, _mm512_set1_ps(y.scale(iy, block)));
                acc[iy] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums[iy]), acc[iy]);
            }
        }
        for (int iy = 0; iy < columns; ++iy) store_k(info, ix, iy, acc[iy], second);
    }
}

template <int columns> void multiply_q4_k(int n, const void * vx, size_t bx, const DataInfo & info, int nrc_x) {
    multiply_k<Q4K, columns>(n, vx, bx, info, nrc_x);
}

template <int columns> void multiply_q5_k(int n, const void * vx, size_t bx, const DataInfo & info, int nrc_x) {
    multiply_k<Q5K, columns>(n, vx, bx, info, nrc_x);
}

template <int columns> void multiply_q6_k(int n, const void * vx, size_t bx, const DataInfo & info, int nrc_x) {
    multiply_k<Q6K, columns>(n, vx, bx, info, nrc_x);
}

// Blocks of 32 weights of eight rows, with a scale a row. A register holds 16 sums, a row of either group each.
struct Q40 {
    using Block = block_iq4_nl_r8;
    static constexpr float offset = 8;

    static void weights(const Block & a, const Block & b, __m512i (&weights)[8]) {
        const auto low = _mm512_set1_epi8(0x0f);
        for (int k = 0; k < 4; ++k) {
            const auto bits = load(a.qs + 32*k, b.qs + 32*k);
            weights[k] = _mm512_and_si512(bits, low);
            weights[k + 4] = _mm512_and_si512(_mm512_srli_epi16(bits, 4), low);
        }
    }
};

struct Q80 {
    using Block = block_q8_0_r8;
    static constexpr float offset = 127;

    static void weights(const Block & a, const Block & b, __m512i (&weights)[8]) {
        for (int k = 0; k < 8; ++k) {
            weights[k] = _mm512_add_epi8(load(a.qs + 32*k, b.qs + 32*k), _mm512_set1_epi8(127));
        }
    }
};

// A column's part of 32 values, with its scale and scaled sum. Four parts at a time share a structure; the rest do not.
struct Part {
    Part(const block_q8_2_x4 * y, int i, int whole) {
        const auto & last = ((const block_q8_2 *)y)[i];
        const auto & four = y[i/4];
        const bool alone = i >= whole;
        qs = alone ? last.qs : four.qs + 32*(i%4);
        const uint32_t bits = (uint32_t)(alone ? last.d : four.d[i%4]) << 16;
        std::memcpy(&d, &bits, sizeof(d));
        m = d*(int16_t)(alone ? last.s : four.d[i%4 + 4]);
    }

    const int8_t * qs;
    float d, m;
};

template <typename Quant, int columns>
void multiply_0(int n, const void * vx, size_t bx, const DataInfo & info, int nrc_x) {
    using Block = typename Quant::Block;
    GGML_ASSERT(nrc_x % 8 == 0);
    const Q8<columns, block_q8_2_x4> y(info);
    const int parts = n/32, whole = parts - parts%4;
    for (int ix = 0; ix < nrc_x; ix += 16) {
        const bool second = ix + 8 < nrc_x;
        const auto * a = (const Block *)((const char *)vx + ix*bx);
        const auto * b = second ? (const Block *)((const char *)vx + (ix + 8)*bx) : a;
        const auto * next = (const Block *)((const char *)vx + (ix + 16)*bx);
        __m512 acc[columns], offsets[columns];
        for (int iy = 0; iy < columns; ++iy) acc[iy] = offsets[iy] = _mm512_setzero_ps();
        for (int i = 0; i < parts; ++i) {
            prefetch<2*sizeof(Block)>(next + 2*i);
            const auto d = halves(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)a[i].d)),
                                  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)b[i].d)));
            __m512i weights[8];
            Quant::weights(a[i], b[i], weights);
            for (int iy = 0; iy < columns; ++iy) {
                const Part part(y.y[iy], i, whole);
                const auto l = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)part.qs));
                const auto h = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)part.qs + 1));
                const auto sum = add_products(add_products(_mm512_setzero_si512(), weights, l), weights + 4, h);
                const auto scale = _mm512_mul_ps(d, _mm512_set1_ps(part.d));
                acc[iy] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), acc[iy]);
                offsets[iy] = _mm512_fmadd_ps(d, _mm512_set1_ps(part.m), offsets[iy]);
            }
        }
        for (int iy = 0; iy < columns; ++iy) {
            const auto sum = _mm512_fmadd_ps(_mm512_set1_ps(-Quant::offset), offsets[iy], acc[iy]);
            info.store(ix, iy, _mm512_castps512_ps256(sum));
            if (second) info.store(ix + 8, iy, _mm512_extractf32x8_ps(sum, 1));
        }
    }
}

template <int columns> void multiply_q4_0(int n, const void * vx, size_t bx, const DataInfo & info, int nrc_x) {
    multiply_0<Q40, columns>(n, vx, bx, info, nrc_x);
}

template <int columns> void multiply_q8_0(int n, const void * vx, size_t bx, const DataInfo & info, int nrc_x) {
    multiply_0<Q80, columns>(n, vx, bx, info, nrc_x);
}

// Puts these kernels in place of the library's for the types that they know; true, so that it can stand behind "&&".
inline bool use_kernels(int type, std::array<mul_mat_t, IQK_MAX_NY> & kernels) {
    const auto for_one = kernels[0];
    switch (type) {
        case GGML_TYPE_Q4_K_R4: IQK_SET_MUL_MAT_FUNCTIONS(multiply_q4_k, kernels) break;
        case GGML_TYPE_Q5_K_R4: IQK_SET_MUL_MAT_FUNCTIONS(multiply_q5_k, kernels) break;
        case GGML_TYPE_Q6_K_R4: IQK_SET_MUL_MAT_FUNCTIONS(multiply_q6_k, kernels) break;
        case GGML_TYPE_Q4_0_R8: IQK_SET_MUL_MAT_FUNCTIONS(multiply_q4_0, kernels) break;
        case GGML_TYPE_Q8_0_R8: IQK_SET_MUL_MAT_FUNCTIONS(multiply_q8_0, kernels) break;
        default: break;
    }
    // For one column and Q8_0 the library's kernel reads one place only, in the same order of operations, and is faster.
    if (type == GGML_TYPE_Q8_0_R8 && for_one) kernels[0] = for_one;
    return true;
}

}  // namespace localspec

// Tells localspec that they are in the library.
extern "C" GGML_API int localspec_kernels(void) { return 1; }

#else

namespace localspec {
template <typename Kernels> bool use_kernels(int, Kernels &) { return true; }
}  // namespace localspec

#endif
