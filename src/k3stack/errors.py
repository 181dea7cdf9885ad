"""Three families of errors: the user can fix it; not now, retry; a bug of ours.

Each family knows the exit status of a command and the HTTP status of a request that ends in it, so that
no caller has to guess. Messages say what does not fit, by how much, and which settings would change it.
"""

from __future__ import annotations


class K3Error(Exception):
    """Base of every error that k3stack raises on purpose."""

    exit_code = 70
    http_status = 500


class UserError(K3Error):
    """The request, the flags or the files are wrong; the message says how to mend them.

    ``param`` names the flag, field or file that is at fault, where there is one.
    """

    exit_code = 2
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CheckpointError(UserError):
    """A checkpoint's files contradict its config, each other, or the format."""


class DoesNotFit(UserError):
    """The answer to the question asked is no: bytes, GPUs or time do not suffice."""

    exit_code = 1


class NotNow(K3Error):
    """Nothing is wrong, but there is no room at the moment: retry after ``retry_after_s`` seconds."""

    exit_code = 3
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(NotNow):
    """The server is starting, draining, or its engine is gone."""

    http_status = 503


class BugError(K3Error):
    """An invariant of ours does not hold; the message carries what is needed to report it."""
