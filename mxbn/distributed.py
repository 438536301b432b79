"""Layers that the processes of an MPI program share, on one machine or on several.

Needs ``pip install 'mxbn[mpi]'``, which brings mpi4py and Open MPI, and a program that is started
by ``mpirun``.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import sys
import threading
from typing import Any, NamedTuple

import numpy as np

from . import _library, _sync

_POLL = 50e-6  # seconds between two looks at messages that are under way
_IDLE = 0.1  # between two looks at whether the process ends

_courier: _Courier | None = None


def init(comm: Any = None) -> Any:
    """Share every `SyncBatchNorm` layer that is made, or first used, from now on.

    The statistics of such a layer are those of the whole batch, whose parts all devices of all
    processes have, and so is the gradient of data. Gradients of parameters are each device's own:
    adding them up over the processes is the program's part, as with any layer. All processes must
    make and first use their layers in the same order, with the same keys. If an error ends one
    process, it ends the others too.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        The processes; default is ``MPI.COMM_WORLD``. Each layer gets a duplicate of its own.

    Returns
    -------
    mpi4py.MPI.Comm
        The processes, with which a program adds up its gradients.

    Raises
    ------
    ImportError
        If mpi4py or MPI is missing.
    RuntimeError
        If it was called before, or if MPI does not take calls of several threads.
    """
    global _courier
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py without an MPI raises the latter
        raise ImportError(
            f"mxbn.distributed needs mpi4py and an MPI: pip install 'mxbn[mpi]' ({error})"
        ) from error
    if _courier is not None:
        raise RuntimeError("mxbn.distributed.init() was called before")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "mxbn.distributed needs an MPI that takes calls of several threads at once, "
            "MPI_THREAD_MULTIPLE: initialize it so, or leave that to mpi4py"
        )
    comm = comm or MPI.COMM_WORLD
    _courier = _Courier(comm)
    _sync.on_layer = _courier.add_layer
    _end_together(comm)
    return comm


def share(symbol: Any) -> None:
    """Share the layers of a symbol that was loaded from a file; `init` comes first.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        With any number of layers.
    """
    for node in json.loads(symbol.tojson())["nodes"]:
        if node["op"] == _library.SYNC_OPERATOR:
            _sync.join(node["attrs"]["key"])


class _Parcel(ctypes.Structure):
    """What the devices of this process have together: MxbnParcel in sync_exports.cc."""

    _fields_ = (
        ("ticket", ctypes.c_int64),
        ("key", ctypes.c_char_p),
        ("direction", ctypes.c_int),
        ("values", ctypes.POINTER(ctypes.c_double)),
        ("count", ctypes.c_int64),
    )


class _Message(NamedTuple):
    """A parcel on its way: MPI writes to `received`."""

    ticket: int
    request: Any
    sent: Any
    received: Any


class _Courier:
    """Carries summaries between this process and the others, on a thread of its own.

    One Iallgather per layer and direction: with what all processes sent, each of them merges in
    the same order, which gives all of them the same bits. Reducing on the way would not.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._layers: dict[str, Any] = {}
        self._adding = threading.Lock()
        self._stopped = False
        self._under_way: list[_Message] = []
        self._thread = threading.Thread(target=self._run, name="mxbn.distributed", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def add_layer(self, key: str) -> None:
        """Give a layer a communicator, unless it has one; all processes do so together."""
        with self._adding:
            if key not in self._layers:
                self._layers[key] = self._comm.Dup()
                _library.function("mxbn_sync_connect", None)(key.encode())

    def _stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        parcel, take = _Parcel(), _library.function("mxbn_sync_take")
        while not self._stopped:
            seconds = _POLL if self._under_way else _IDLE
            if take(ctypes.c_double(seconds), ctypes.byref(parcel)):
                self._send(parcel)
            self._under_way = [message for message in self._under_way if not self._arrived(message)]

    def _send(self, parcel: _Parcel) -> None:
        sent = np.ctypeslib.as_array(parcel.values, (parcel.count,)).copy()
        received = np.empty((self._comm.size, parcel.count))
        try:
            request = self._layers[parcel.key.decode()].Iallgather(sent, received)
        except Exception as error:  # whatever it is, the devices wait for an answer
            self._answer(parcel.ticket, received, str(error))
        else:
            self._under_way.append(_Message(parcel.ticket, request, sent, received))

    def _arrived(self, message: _Message) -> bool:
        try:
            if not message.request.Test():
                return False
        except Exception as error:
            self._answer(message.ticket, message.received, str(error))
        else:
            self._answer(message.ticket, message.received)
        return True

    def _answer(self, ticket: int, received: Any, error: str | None = None) -> None:
        _library.function("mxbn_sync_answer", None)(
            ctypes.c_int64(ticket),
            ctypes.c_void_p(received.ctypes.data),
            ctypes.c_int64(received.shape[1]),
            len(received),
            None if error is None else f"between the processes: {error}".encode(),
        )


def _end_together(comm: Any) -> None:
    """Let an error that ends this process end the others, which would wait for it."""
    before = sys.excepthook

    def hook(*error: Any) -> None:
        before(*error)
        print(
            f"mxbn: process {comm.rank} of {comm.size} failed, which ends the others",
            file=sys.stderr,
            flush=True,
        )
        comm.Abort(1)

    sys.excepthook = hook
