"""What ``localspec models inspect`` shows: the facts of one or two headers, as lines or as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from localspec.backend.compatibility import check_compatible
from localspec.backend.model_header import ModelHeader, read_header
from localspec.errors import IncompatibleModelsError
from localspec.registry import human_bytes

__all__ = ["Inspection", "memory_parts"]

LOGITS_ROWS: Final = 16
"""Rows of logits counted for a model: more than any step of drafting and verifying asks for."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """One model, or a target and its draft, at a context of so many tokens."""

    models: tuple[tuple[str, ModelHeader], ...]
    context: int
    problem: IncompatibleModelsError | None

    @classmethod
    def of(cls, files: list[tuple[str, Path]], *, context: int) -> Inspection:
        """Read the headers of the files and, if there are two, compare their vocabularies."""
        models = tuple((name, read_header(path)) for name, path in files)
        problem = None
        if len(models) == 2:
            try:
                check_compatible(models[0][1], models[1][1])
            except IncompatibleModelsError as error:
                problem = error
        return cls(models, context, problem)

    def lines(self) -> list[str]:
        """The report for a terminal."""
        result = []
        for name, header in self.models:
            result += [name, *(f"  {label:<16}{value}" for label, value in self._facts(header)), ""]
        if len(self.models) == 2:
            total = sum(sum(self._memory(header).values()) for _, header in self.models)
            verdict = "no" if self.problem else "yes, the two share a vocabulary"
            result += ["As a pair", f"  {'compatible':<16}{verdict}"]
            result += [f"  {'memory':<16}at {self.context:,} tokens: {human_bytes(total)} for both", ""]
        return result[:-1]

    def as_json(self) -> dict[str, Any]:
        """The same as values."""
        pair = None
        if len(self.models) == 2:
            pair = {
                "compatible": self.problem is None,
                "reason": None if self.problem is None else str(self.problem),
                "can_roll_back": all(header.can_roll_back for _, header in self.models),
                "memory_bytes": sum(sum(self._memory(header).values()) for _, header in self.models),
            }
        return {
            "context": self.context,
            "models": [self._model_as_json(name, header) for name, header in self.models],
            "pair": pair,
        }

    def _memory(self, header: ModelHeader) -> dict[str, int]:
        return memory_parts(header, self.context)

    def _facts(self, header: ModelHeader) -> list[tuple[str, str]]:
        memory = {part: human_bytes(size) for part, size in self._memory(header).items()}
        special = [
            f"{name} {token} ({'added' if added else 'not added'} to prompts)"
            for name, token, added in (
                ("BOS", header.bos_id, header.add_bos),
                ("EOS", header.eos_id, header.add_eos),
            )
            if token is not None
        ]
        tokenizer = ", ".join(filter(None, (header.tokenizer_model, header.tokenizer_pre)))
        trained = f"{header.context_length:,} tokens as trained" if header.context_length else "not stated"
        if header.context_length and self.context > header.context_length:
            trained += f"; {self.context:,} is more than it was trained for"
        shape = f"{header.block_count} layers of {header.embedding_length}"
        heads = f"{max(header.head_count)} heads, {max(header.head_count_kv)} of keys and values"
        cut = f", logits for {header.kept_ids.count:,} of them" if header.kept_ids else ""
        template = header.chat_template
        return [
            ("file", f"{header.path} ({human_bytes(header.file_bytes)})"),
            ("model", header.name or "not named"),
            ("architecture", f"{header.architecture}, {shape}, {heads}"),
            ("parameters", f"{header.parameter_count / 1e6:,.0f} million"),
            ("quantisation", f"{header.file_type}, most bytes in {header.tensor_type}"),
            ("vocabulary", f"{header.vocabulary_size:,} tokens ({tokenizer}){cut}"),
            ("special tokens", ", ".join(special) or "none stated"),
            ("context", trained),
            ("chat template", f"yes, {len(template):,} characters" if template else "none"),
            ("rollback", header.rollback_note),
            (
                "memory",
                f"at {self.context:,} tokens: weights {memory['weights']}, KV cache {memory['cache']}, "
                f"logits {memory['logits']} ({LOGITS_ROWS} rows)",
            ),
        ]

    def _model_as_json(self, name: str, header: ModelHeader) -> dict[str, Any]:
        return {
            "name": name,
            "path": str(header.path),
            "file_bytes": header.file_bytes,
            "model": header.name,
            "architecture": header.architecture,
            "file_type": header.file_type,
            "tensor_type": header.tensor_type,
            "parameter_count": header.parameter_count,
            "block_count": header.block_count,
            "embedding_length": header.embedding_length,
            "head_count": list(header.head_count),
            "head_count_kv": list(header.head_count_kv),
            "key_length": header.key_length,
            "value_length": header.value_length,
            "sliding_window": header.sliding_window,
            "vocabulary_size": header.vocabulary_size,
            "kept_ids": header.kept_ids.count if header.kept_ids else None,
            "tokenizer_model": header.tokenizer_model,
            "tokenizer_pre": header.tokenizer_pre,
            "bos_id": header.bos_id,
            "eos_id": header.eos_id,
            "add_bos": header.add_bos,
            "add_eos": header.add_eos,
            "context_length": header.context_length,
            "chat_template": header.chat_template,
            "can_roll_back": header.can_roll_back,
            "memory_bytes": self._memory(header),
        }


def memory_parts(header: ModelHeader, context: int) -> dict[str, int]:
    """Return the bytes that a model takes at a context of so many tokens, by what takes them."""
    return {
        "weights": header.file_bytes,
        "cache": header.cache_bytes(context),
        "logits": header.logits_bytes(LOGITS_ROWS),
    }
