// Multiplies random weights by random columns with scripts/ik_kernels.h. Outputs are compared with what the formats mean,
// in double precision, and to the last bit with the same sums in the order of ik_llama.cpp's kernels for several columns.
// Prints a line for each fault, and the number of outputs compared.

#include <immintrin.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

// What the kernels use of the library.
#define HAVE_FANCY_SIMD
#define GGML_API
#define GGML_ASSERT(condition) if (!(condition)) std::abort();
constexpr int IQK_MAX_NY = 8;
using ggml_half = uint16_t;
struct block_q4_k_r4 { ggml_half d[8]; uint8_t scales_h[16], scales_l[32], qs[512]; };
struct block_q5_k_r4 { ggml_half d[8]; uint8_t scales_h[16], scales_l[32], qh[128], qs[512]; };
struct block_q6_k_r4 { ggml_half d[4]; int8_t scales[64]; uint8_t qh[256], ql[512]; };
struct block_iq4_nl_r8 { ggml_half d[8]; uint8_t qs[128]; };
struct block_q8_0_r8 { ggml_half d[8]; int8_t qs[256]; };
struct block_q8_K { float d, sum; int8_t qs[256]; int16_t bsums[16]; };
struct block_q8_2 { uint16_t d, s; int8_t qs[32]; };
struct block_q8_2_x4 { uint16_t d[8]; int8_t qs[128]; };
enum { GGML_TYPE_Q4_K_R4, GGML_TYPE_Q5_K_R4, GGML_TYPE_Q6_K_R4, GGML_TYPE_Q4_0_R8, GGML_TYPE_Q8_0_R8, OTHER };

struct DataInfo {
    float * s;
    const char * cy;
    size_t bs, by;
    void store(int ix, int iy, __m128 v) const { _mm_storeu_ps(s + iy*bs + ix, v); }
    void store(int ix, int iy, __m256 v) const { _mm256_storeu_ps(s + iy*bs + ix, v); }
};

template <int columns, typename Block> struct Q8 {
    explicit Q8(const DataInfo & info) {
        for (int i = 0; i < columns; ++i) y[i] = (const Block *)(info.cy + i*info.by);
    }
    __m256i load_quants(int iy, int i, int j) const { return _mm256_loadu_si256((const __m256i *)y[iy][i].qs + j); }
    __m256i load_bsums(int iy, int i) const { return _mm256_loadu_si256((const __m256i *)y[iy][i].bsums); }
    float scale(int iy, int i) const { return y[iy][i].d; }
    const Block * y[columns];
};

using mul_mat_t = void (*)(int, const void *, size_t, const DataInfo &, int);
#define IQK_SET_MUL_MAT_FUNCTIONS(kernel, funcs) \
    funcs = {kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>, kernel<7>, kernel<8>};

#include "ik_kernels.h"

static std::mt19937 random_bits(7);
static int below(int n) { return (int)(random_bits() % n); }
static void fill(void * data, size_t size) {
    for (size_t i = 0; i < size; ++i) ((uint8_t *)data)[i] = (uint8_t)random_bits();
}
static ggml_half half() { return _cvtss_sh((below(2000) - 1000)*1e-5f, 0); }
static float value(ggml_half h) { return _cvtsh_ss(h); }
static float bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float found;
    std::memcpy(&found, &wide, 4);
    return found;
}

struct Case {
    const char * name;
    int type, rows_together, n;
    size_t row_bytes;       // of one row, as the library counts
    size_t column_bytes;
    std::function<void(char *)> make_group;                                        // of rows that are stored together
    std::function<void(char *)> make_column;
    std::function<struct Output(const char *, int, const char *)> output;  // of a row of a group
};

// A sum of products, the sum of their sizes, and the sum as it is rounded step by step.
struct Output {
    double sum = 0, size = 0;
    float rounded = 0;

    void add(double term) {
        sum += term;
        size += std::fabs(term);
    }
};

static int compared = 0;

static void run(const Case & c) {
    constexpr int columns = 8;
    std::array<mul_mat_t, IQK_MAX_NY> kernels{};
    if (!localspec::use_kernels(c.type, kernels)) std::printf("%s: not taken\n", c.name);
    for (int groups : {1, 2, 3, 17}) {
        const int rows = groups*c.rows_together;
        std::vector<char> weights(rows*c.row_bytes), ys(columns*c.column_bytes);
        for (int g = 0; g < groups; ++g) c.make_group(weights.data() + g*c.rows_together*c.row_bytes);
        for (int i = 0; i < columns; ++i) c.make_column(ys.data() + i*c.column_bytes);
        const int width = rows + 8;
        std::vector<Output> right;
        for (int i = 0; i < columns; ++i) {
            for (int r = 0; r < rows; ++r) {
                const char * group = weights.data() + r/c.rows_together*c.rows_together*c.row_bytes;
                right.push_back(c.output(group, r % c.rows_together, ys.data() + i*c.column_bytes));
            }
        }
        for (int count = columns; count >= 1; --count) {
            std::vector<float> out(columns*width, -7.0f);
            kernels[count - 1](c.n, weights.data(), c.row_bytes, DataInfo{out.data(), ys.data(), (size_t)width, c.column_bytes}, rows);
            for (int i = 0; i < columns; ++i) {
                for (int r = 0; r < width; ++r) {
                    const float found = out[i*width + r];
                    if (i >= count || r >= rows) {
                        if (found != -7.0f) std::printf("%s: wrote row %d of column %d\n", c.name, r, i);
                        continue;
                    }
                    const auto & to_be = right[i*rows + r];
                    if (!(std::fabs(found - to_be.sum) <= 1e-6*to_be.size)) std::printf("%s: %g for %g\n", c.name, found, to_be.sum);
                    if (std::memcmp(&found, &to_be.rounded, 4)) std::printf("%s: %d columns: another rounding\n", c.name, count);
                    ++compared;
                }
            }
        }
    }
}

// The weight of row r, part i (32 weights), at 16*half + 4*k + t, of what K-quants keep four bits of.
static int four_bits(const uint8_t * qs, int r, int i, int half, int k, int t) {
    const int byte = qs[64*i + 32*(k & 1) + 16*half + 4*r + t];
    return k & 2 ? byte >> 4 : byte & 15;
}

// K-quants. `add_sums` gives a column's block its sums; `add_block` adds a row's products of one block, the minimums to
// the floats and the rest to the integers, of the first and the second half of each part.
template <typename Block>
using AddBlock = void (*)(const Block &, const block_q8_K &, int r, Output &, float (&acc)[2], int (&sums)[2]);

template <typename Block>
static Case of_256(const char * name, int type, int n, void (*add_sums)(block_q8_K &), AddBlock<Block> add_block) {
    Case c{name, type, 4, n, n/256*sizeof(Block)/4, n/256*sizeof(block_q8_K), {}, {}, {}};
    c.make_group = [n](char * data) {
        fill(data, n/256*sizeof(Block));
        for (int b = 0; b < n/256; ++b) for (auto & d : ((Block *)data)[b].d) d = half();
    };
    c.make_column = [n, add_sums](char * data) {
        for (int b = 0; b < n/256; ++b) {
            auto & y = ((block_q8_K *)data)[b];
            fill(y.qs, sizeof(y.qs));
            y.d = (below(1000) + 1)*1e-4f;
            add_sums(y);
        }
    };
    c.output = [n, add_block](const char * group, int r, const char * column) {
        Output out;
        float acc[2] = {};
        for (int b = 0; b < n/256; ++b) {
            const auto & x = ((const Block *)group)[b];
            const auto & y = ((const block_q8_K *)column)[b];
            int sums[2] = {};
            add_block(x, y, r, out, acc, sums);
            for (int h = 0; h < 2; ++h) acc[h] = std::fma(value(x.d[r])*y.d, (float)sums[h], acc[h]);
        }
        out.rounded = acc[0] + acc[1];
        return out;
    };
    return c;
}

static void sums_of_parts(block_q8_K & y) {  // any will do
    for (int i = 0; i < 8; ++i) {
        const float sum = below(2000) - 1000;
        std::memcpy((char *)y.bsums + 4*i, &sum, 4);
    }
}

static void sums_of_halves(block_q8_K & y) {
    for (int j = 0; j < 16; ++j) {
        y.bsums[j] = 0;
        for (int i = 0; i < 16; ++i) y.bsums[j] += y.qs[16*j + i];
    }
}

static int fifth_bit(const block_q4_k_r4 &, int, int, int, int, int) { return 0; }
static int fifth_bit(const block_q5_k_r4 & x, int r, int i, int half, int k, int t) {
    return x.qh[16*i + 4*r + t] >> (4*half + (std::array<int, 4>{0, 2, 1, 3})[k]) & 1;
}

template <typename Block>
static void with_minimums(const Block & x, const block_q8_K & y, int r, Output & out, float (&acc)[2], int (&sums)[2]) {
    for (int i = 0; i < 8; ++i) {
        const int at = 4*i + r, upper = x.scales_h[at % 16] >> (at < 16 ? 0 : 4);
        const int scale = (x.scales_l[at] & 15) | (upper & 3) << 4;
        const int least = x.scales_l[at] >> 4 | (upper >> 2 & 3) << 4;
        float part;
        std::memcpy(&part, (const char *)y.bsums + 4*i, 4);
        out.add(-(double)value(x.d[4 + r])*least*part);
        acc[i/4] = std::fma(-value(x.d[4 + r])*least, part, acc[i/4]);
        for (int j = 0; j < 32; ++j) {
            const int weight = four_bits(x.qs, r, i, j/16, j/4%4, j%4) + 16*fifth_bit(x, r, i, j/16, j/4%4, j%4);
            out.add((double)value(x.d[r])*y.d*scale*weight*y.qs[32*i + j]);
            sums[j/16] += scale*weight*y.qs[32*i + j];
        }
    }
}

static void of_q6_k(const block_q6_k_r4 & x, const block_q8_K & y, int r, Output & out, float (&)[2], int (&sums)[2]) {
    for (int j = 0; j < 256; ++j) {
        const int i = j/32, half = j/16%2, k = j/4%4, t = j%4;
        const int two = x.qh[32*i + 16*half + 4*r + t] >> (std::array<int, 4>{0, 4, 2, 6})[k] & 3;
        const int weight = four_bits(x.ql, r, i, half, k, t) + 16*two - 32;
        const int scale = x.scales[8*i + 4*half + r];
        out.add((double)value(x.d[r])*y.d*scale*weight*y.qs[j]);
        sums[half] += scale*(weight + 32)*y.qs[j];
        sums[j/128] -= scale*32*y.qs[j];  // taken off by halves of the block
    }
}

// Where a column keeps its part i of 32 values: four at a time share a structure, as far as there are four.
struct Part32 {
    Part32(const char * column, int i, int n) {
        auto & four = ((block_q8_2_x4 *)column)[i/4];
        auto & alone = ((block_q8_2 *)column)[i];
        const bool whole = i < n/32/4*4;
        qs = whole ? four.qs + 32*(i%4) : alone.qs;
        d = whole ? &four.d[i%4] : &alone.d;
        s = whole ? &four.d[i%4 + 4] : &alone.s;
    }

    int8_t * qs;
    uint16_t * d, * s;
};

template <typename Block>
static Case of_32(const char * name, int type, int n, int offset, int (*weight)(const Block &, int, int)) {
    Case c{name, type, 8, n, n/32*sizeof(Block)/8, n/32*sizeof(block_q8_2), {}, {}, {}};
    c.make_group = [n](char * data) {
        for (int i = 0; i < n/32; ++i) {
            auto & x = ((Block *)data)[i];
            fill(x.qs, sizeof(x.qs));
            if (sizeof(x.qs) == 256) for (auto & q : x.qs) if ((int8_t)q == -128) q = -127;  // which the format has not
            for (auto & d : x.d) d = half();
        }
    };
    c.make_column = [n](char * data) {
        for (int i = 0; i < n/32; ++i) {
            Part32 y(data, i, n);
            fill(y.qs, 32);
            int16_t sum = 0;
            for (int j = 0; j < 32; ++j) sum += y.qs[j];
            *y.d = (uint16_t)(0x3c00 + below(256));
            *y.s = (uint16_t)sum;
        }
    };
    c.output = [n, offset, weight](const char * group, int r, const char * column) {
        Output out;
        float acc = 0, offsets = 0;
        for (int i = 0; i < n/32; ++i) {
            const auto & x = ((const Block *)group)[i];
            const Part32 y(column, i, n);
            const float dx = value(x.d[r]), dy = bf16(*y.d);
            const double d = (double)dx*dy;
            int sum = 0;
            for (int j = 0; j < 32; ++j) {
                out.add(d*weight(x, r, j)*y.qs[j]);
                out.size += 127*std::fabs(d*y.qs[j]);  // what is added and taken off again is rounded too
                sum += (weight(x, r, j) + offset)*y.qs[j];
            }
            acc = std::fma(dx*dy, (float)sum, acc);
            offsets = std::fma(dx, dy*(int16_t)*y.s, offsets);
        }
        out.rounded = std::fma((float)-offset, offsets, acc);
        return out;
    };
    return c;
}

static int of_q4_0(const block_iq4_nl_r8 & x, int r, int j) {
    const int byte = x.qs[32*(j/4%4) + 4*r + j%4];
    return (j < 16 ? byte & 15 : byte >> 4) - 8;
}

static int of_q8_0(const block_q8_0_r8 & x, int r, int j) { return x.qs[32*(j/4) + 4*r + j%4]; }

int main() {
    for (int n : {256, 2304}) {
        run(of_256<block_q4_k_r4>("q4_k", GGML_TYPE_Q4_K_R4, n, sums_of_parts, with_minimums));
        run(of_256<block_q5_k_r4>("q5_k", GGML_TYPE_Q5_K_R4, n, sums_of_parts, with_minimums));
        run(of_256<block_q6_k_r4>("q6_k", GGML_TYPE_Q6_K_R4, n, sums_of_halves, of_q6_k));
    }
    for (int n : {64, 96, 128, 1184}) {  // with 2, 3, no and 1 parts beyond the last four
        run(of_32<block_iq4_nl_r8>("q4_0", GGML_TYPE_Q4_0_R8, n, 8, of_q4_0));
        run(of_32<block_q8_0_r8>("q8_0", GGML_TYPE_Q8_0_R8, n, 127, of_q8_0));
    }
    std::array<mul_mat_t, IQK_MAX_NY> untouched{};
    if (!localspec::use_kernels(OTHER, untouched) || untouched[0]) std::printf("other types: taken\n");
    if (localspec_kernels() != 1) std::printf("not announced\n");
    std::printf("%d compared\n", compared);
}
