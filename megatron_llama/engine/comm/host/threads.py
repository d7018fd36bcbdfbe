"""A ``Stream`` made of threads, for CPU tensors over gloo.

The host has no streams, so the work that follows a transfer (a sum in rank order, a part of the
norm, an update) needs a thread. Callbacks would not do: the Work of a gloo send or receive has no
future, and says that it is completed only after a thread has waited for it.
"""

from __future__ import annotations

from megatron_llama.engine.comm.worker import Task, Work, Worker


class ThreadStream:
    """Two threads: one starts transfers, the other one waits for them and does the follow-up work.

    With one thread, a transfer could not start before the follow-up work of the one before is done.
    The computing thread itself should not start a transfer either: a sender copies as much as fits
    into its socket, which takes processor time from the computation."""

    def __init__(self) -> None:
        self._issuing = Worker("issue")
        self._follow_up = Worker("follow_up")

    def issue(self, work: Work) -> Task:
        return self._issuing.submit(work)

    def run(self, work: Work) -> Task:
        return self._follow_up.submit(work)

    def run_update(self, work: Work) -> Task:
        return self.run(work)

    def fail(self, error: BaseException) -> None:
        self._issuing.fail(error)
        self._follow_up.fail(error)

    def close(self) -> None:
        self._issuing.close()
        self._follow_up.close()

    def join(self, seconds: float) -> None:
        self._issuing.join(seconds)
        self._follow_up.join(seconds)
