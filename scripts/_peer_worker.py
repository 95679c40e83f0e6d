"""A Python library as a process: requests come as JSON lines, each token goes out as a line.

    python scripts/_peer_worker.py KIND THREADS CONTEXT TARGET [DRAFT]

KIND is localspec-llamacpp, localspec-ik, llama-cpp-python or llama-cpp-python-lookup. A request has the fields of
``_peers.Job`` and those of ``_peers.SAMPLING``. The answer is ``{"token": id}`` for each token and last
``{"done": true, "steps": n}``. localspec also answers ``{"encode": text}`` with the ids of the prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

Replies = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]


def localspec_session(threads: int, context: int, target: str, draft: str | None, *, backend: Any) -> Replies:
    """Serve a ``Session``."""
    import localspec

    session = localspec.load_pair(target=target, draft=draft, threads=threads, context=context, backend=backend)

    def replies(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "encode" in job:
            yield {"prompt": session.encode(job["encode"])}
            return
        session.engine.clear()
        stream = session.stream(
            job["text"],
            localspec.SamplingParams(**{key: job[key] for key in ("temperature", "top_k", "top_p", "min_p")}),
            max_tokens=job["max_tokens"],
            seed=job["seed"],
            num_draft_tokens=job["num_draft_tokens"],
        )
        for event in stream:
            yield {"token": event.token}
        yield {"done": True, "steps": stream.stats.steps}

    return replies


def llama_cpp_python(threads: int, context: int, target: str, *, lookup: bool) -> Replies:
    """Serve a ``Llama``, at its defaults but for what every side is told."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = (
        LlamaPromptLookupDecoding(num_pred_tokens=2) if lookup else None
    )  # 2: what its documentation says for CPUs
    llama = Llama(target, n_ctx=context, n_threads=threads, n_threads_batch=threads, draft_model=draft, verbose=False)
    passes = [0]
    evaluate = llama.eval

    def counted(tokens: Any) -> None:
        passes[0] += 1
        evaluate(tokens)

    llama.eval = counted  # type: ignore[method-assign]

    def replies(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        llama.reset()  # type: ignore[no-untyped-call]
        llama.set_seed(job["seed"])
        passes[0] = 0
        settings = {key: job[key] for key in ("top_k", "top_p", "min_p")}
        produced = llama.generate(job["prompt"], temp=job["temperature"], repeat_penalty=1.0, **settings)
        for _, token in zip(range(job["max_tokens"]), produced, strict=False):
            yield {"token": int(token)}
            if token == llama.token_eos():
                break
        yield {"done": True, "steps": passes[0]}

    return replies


def main() -> int:
    kind, threads, context, target, *drafts = sys.argv[1:]
    if kind.startswith("localspec"):
        backend = kind.removeprefix("localspec-")
        replies = localspec_session(
            int(threads), int(context), target, drafts[0] if drafts else None, backend=backend
        )
    else:
        replies = llama_cpp_python(int(threads), int(context), target, lookup=kind.endswith("lookup"))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        for reply in replies(json.loads(line)):
            print(json.dumps(reply), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
