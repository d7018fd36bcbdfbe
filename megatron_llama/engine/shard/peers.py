"""The other ranks, as far as a failure of one of them concerns them.

In a planned step nobody asks what the others do, so a rank that cannot go on would keep them
waiting until the timeout. It leaves the reason in the job's store and ends its communicators. With
gloo that ends its connections, and so nearly all waits of the peers; they raise the reason, and end
theirs. A wait for a message of which a part has gone over the connection does not end with it
(``Pair::signalException`` leaves it out), and on a device a wait ends with the rank's own
communicator only: so a thread looks into the store once a second. Where it finds a reason, nobody
waits for the engine's threads any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from weakref import WeakMethod

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.shard.data_mesh import close_data_mesh
from megatron_llama.errors import TrainingError

LOOK_SECONDS = 1.0
"""How often a rank looks whether another one has left."""
_REASON = "reason"


def _closed(rank: int) -> str:
    return f"closed/{rank}"


class OrderError(TrainingError, RuntimeError):
    """The model has used its weights in another order than before, or than on another rank; or
    another rank cannot go on."""


class Peers:
    """The other ranks of an engine."""

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.world
        self._mesh = mesh
        self._store: Store | None = None
        self.left: str | None = None
        """Why the ranks have left each other."""
        self.end_waits: WeakMethod[Callable[[BaseException], None]] | None = None
        """Fails what the engine's threads wait for."""
        self._stopped = threading.Event()
        self._looking: threading.Thread | None = None
        if self.axis.group is not None:
            store = dist.distributed_c10d._get_default_store()
            self._store = PrefixStore(f"megatron_llama/{self.axis.group.group_name}", store)
            # The thread must not keep the communicators of an engine that nobody has closed.
            watched = weakref.ref(self)
            self._looking = devices.start_thread(
                _look, self._store, watched, self._stopped, name="peers"
            )
            weakref.finalize(self, self._stopped.set)

    def leave(self, reason: str) -> None:
        """Tell the others why this rank does not go on. The first reason of all counts."""
        if self.left is not None:
            return
        # Before the communicators end: what then comes out of a stream is not to be used, and
        # whoever reads it sees this.
        self.left = reason
        if self._store is not None:
            self._store.compare_set(_REASON, "", reason)
            close_data_mesh(self._mesh, abort=True)
            end_waits = self.end_waits() if self.end_waits is not None else None
            if end_waits is not None:
                end_waits(OrderError(reason))

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one that a wait has raised: the reason of the rank that has
        left, if one has."""
        if isinstance(error, OrderError) or self._store is None:
            return error
        reason = self._reason(self._store)
        if reason is None:
            return error
        self.leave(reason)
        return OrderError(reason)

    def explained(self) -> AbstractContextManager[None]:
        """A section in which the end of a wait becomes the reason of the rank that has left."""
        return _Explained(self)

    def close(self) -> None:
        """Look no longer, and say that this rank has come to its end."""
        self._stopped.set()
        if self._looking is not None:
            # A thread that is inside of the store's client when the interpreter ends aborts the
            # process. No longer than this: the store's host may have been stopped.
            self._looking.join(LOOK_SECONDS)
        if self._store is not None and self.left is None:
            with suppress(DistError):  # the store went with the process that had it
                self._store.set(_closed(self.axis.rank), "yes")

    def _reason(self, store: Store) -> str | None:
        """Return why the ranks have left each other; None if nobody has said so."""
        try:
            if store.check([_REASON]):
                return store.get(_REASON).decode()
            # Who closes its engine leaves in peace, unless another rank still needs it.
            closed = [rank for rank in range(self.axis.size) if store.check([_closed(rank)])]
        except DistError:  # the store went with the process that had it
            return None
        if not closed:
            return None
        return str(
            OrderError(
                f"rank {closed[0]}",
                got="engine.close(), or the end of its process",
                expected="as many steps and passes as on the other ranks",
                do="give every rank the same number of batches",
            )
        )


class _Explained(AbstractContextManager[None]):
    """``Peers.explained``. No generator: a linear layer enters half a dozen in a step, at 0.5
    microseconds each instead of 1.2."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        peers = self._peers
        if isinstance(error, RuntimeError):
            explained = peers.explain(error)
            if explained is not error:
                raise explained from error
        # On a device the host hears nothing of a wait that has ended before its message came: only
        # a stream has waited, and what it computes next reads memory that was not filled.
        elif error is None and peers.left is not None:
            raise OrderError(peers.left)


def _look(store: Store, watched: weakref.ref[Peers], stopped: threading.Event) -> None:
    """Leave as soon as another rank has told a reason."""
    while not stopped.wait(LOOK_SECONDS):
        try:
            reason = store.get(_REASON).decode() if store.check([_REASON]) else None
        except DistError:
            return
        peers = watched()
        if peers is None:
            return
        if reason is not None:
            peers.leave(reason)
            return
        del peers
