"""Fetching one file from Hugging Face, continuing where an earlier attempt stopped.

huggingface_hub finds the file, signs in (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) and names the errors. The
transfer itself is ours, because its downloads begin anew in each process: they leave nothing behind when they
are interrupted, and a laptop does not fetch five gigabytes in one go.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from localspec._version import __version__
from localspec.errors import DownloadError, IntegrityError

if TYPE_CHECKING:
    from localspec.registry.entries import HuggingFaceFile
    from localspec.registry.partial import PartialFile, Writer
    from localspec.registry.progress import Advance, Reporter

__all__ = ["RemoteFile", "fetch", "look_up"]

_RETRIES: Final = 5
_RETRY_WAIT_S: Final = 1.0
_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the server says of a file; ``etag`` is the SHA-256 of a large file, a Git hash of a small one."""

    source: HuggingFaceFile
    url: str
    etag: str
    size: int | None

    @property
    def sha256(self) -> str | None:
        """The SHA-256 that the server declares, if it does."""
        return self.etag if _SHA256.fullmatch(self.etag) else None

    @property
    def origin(self) -> str:
        """Identifies the content, so that bytes of an older version are never continued."""
        return f"{self.source.repo}/{self.source.file}@{self.etag}"


def look_up(source: HuggingFaceFile) -> RemoteFile:
    """Ask the server about the file; raises :class:`DownloadError` where there is no answer to use."""
    import huggingface_hub

    try:
        url = huggingface_hub.hf_hub_url(source.repo, source.file, revision=source.revision)
        metadata = huggingface_hub.get_hf_file_metadata(url, library_name="localspec", library_version=__version__)
    except _http_errors() as error:
        raise _explain(source, error) from error
    if metadata.etag is None:
        raise DownloadError(f"{source}: the answer has no ETag, so this is no Hugging Face endpoint")
    return RemoteFile(source, url, metadata.etag, metadata.size)


def fetch(remote: RemoteFile, partial: PartialFile, *, advance: Advance, reporter: Reporter) -> None:
    """Bring ``partial`` to its full length; a cut connection is taken up again up to five times in a row."""
    partial.begin(remote.origin)
    name, size = remote.source.file, remote.size
    start = partial.bytes if size is None or partial.bytes <= size else 0
    best, failures = start, 0
    with partial.opened_at(start) as writer:
        while size is None or writer.length < size:
            error = _transfer(remote, writer, advance, reporter)
            if size is None and error is None:
                return
            failures = 0 if writer.length > best else failures + 1
            best = max(best, writer.length)
            if failures > _RETRIES:
                raise error or DownloadError(f"{remote.source}: {name} ends at byte {best:,} again and again")
            if error is not None:
                time.sleep(_RETRY_WAIT_S * max(failures, 1))
        if writer.length > size:
            writer.restart(0)
            raise IntegrityError(f"{remote.source}: {name} is longer than the {size:,} bytes it declares")


def _transfer(remote: RemoteFile, writer: Writer, advance: Advance, reporter: Reporter) -> DownloadError | None:
    """One request for what is missing; returns the error if it may pass, raises it if it will not."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    # Both are documented, but the package's stubs leave them out of its exports.
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers(library_name="localspec", library_version=__version__) | {
        "Accept-Encoding": "identity"
    }
    if writer.length:
        headers["Range"] = f"bytes={writer.length}-"
    try:
        with huggingface_hub.get_session().stream(
            "GET", remote.url, headers=headers, follow_redirects=True, timeout=HF_HUB_DOWNLOAD_TIMEOUT
        ) as response:
            if response.status_code == 416:
                writer.restart(0)
                return DownloadError(f"{remote.source}: the server refuses to continue {remote.source.file}")
            hf_raise_for_status(response)
            _align(remote, response, writer, reporter)
            # In pieces as they arrive: collected into larger ones, a cut connection would lose the last.
            for chunk in response.iter_bytes():
                writer.write(chunk)
                advance(writer.length)
    except _http_errors() as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None and status not in _TRANSIENT:
            raise _explain(remote.source, error) from error
        return _explain(remote.source, error)
    return None


def _align(remote: RemoteFile, response: Any, writer: Writer, reporter: Reporter) -> None:
    """Make the writer stand where the response begins."""
    if not writer.length:
        return
    if response.status_code != 206:
        reporter.notice(f"{remote.source.file}: the server cannot continue a download, so it starts again")
        writer.restart(0)
        return
    match = re.match(r"bytes (\d+)-\d+/(\d+|\*)$", response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != writer.length or match[2] not in ("*", str(remote.size)):
        writer.restart(0)
        raise DownloadError(f"{remote.source}: the server sent another part of {remote.source.file} than asked")


def _http_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: its own errors, and those of an HTTP library that its versions rename."""
    from huggingface_hub.errors import HfHubHTTPError

    library = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    return (*library, OSError, ValueError)


def _explain(source: HuggingFaceFile, error: Exception) -> DownloadError:
    """Say in one line what went wrong and what the user can do."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"the page of {source.repo}"
    if isinstance(error, OfflineModeIsEnabled):
        what = "HF_HUB_OFFLINE is set; unset it to fetch"
    elif isinstance(error, GatedRepoError) or status == 403:
        what = f"access is refused (HTTP {status}); accept the licence on {page} and set HF_TOKEN"
    elif status == 401:
        what = f"HTTP 401: private, gated, or not there; set HF_TOKEN to a token that may read {source.repo}"
    elif status == 404:
        what = f"HTTP 404: there is no {source.file} at revision {source.revision!r} there"
    elif status is not None:
        what = f"the server answers HTTP {status}; try again later"
    else:
        what = f"no connection ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return DownloadError(f"{source}: {what}")
