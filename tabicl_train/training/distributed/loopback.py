"""A rendezvous for ranks on one machine, which listens on the loopback address only.

torch's own rendezvous (c10d) listens on all interfaces without a password, and unpickles what it finds in its store:
whoever reaches its port can run code. A `TCPStore` also listens on all interfaces, whatever its host name, unless it is
given a socket.

    python -m tabicl_train.training.distributed.loopback --rdzv-backend loopback ...

is torchrun with this rendezvous.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "loopback"
ADDRESS = "127.0.0.1"
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# The network interface for exchanges between ranks, whose sockets by default listen on the address of the host name.
# Without "=", NCCL also takes interfaces whose names begin in this way. With the last variable, each start has a new
# store.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def open_store() -> TCPStore:
    """Return a store for processes on this machine, on a free port."""
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single elastic agent; the ranks of each start meet in a new store of the agent."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        if parameters.max_nodes > 1:
            raise ValueError(f"--rdzv-backend {BACKEND} is for one machine; use c10d for several")
        self.run_id = parameters.run_id
        os.environ.update(VARIABLES)  # inherited by the ranks

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks connect to the store of the agent instead of opening one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = open_store()
        # Block ctrl-C in the ranks, which the agent starts next and which inherit this: while Python starts, it would
        # print a stack trace. tabicl-train unblocks it in a rank, and `num_nodes_waiting` does so here.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """Return how many machines want to join; the agent asks ten times a second once the ranks have started."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        # If a rank has failed immediately, `num_nodes_waiting` was not called.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return True


def register_rendezvous() -> None:
    """Let torch's elastic agent find the rendezvous by its name."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)


if __name__ == "__main__":
    from torch.distributed.run import main

    register_rendezvous()
    main()
