"""The meeting point of ranks on one machine, which listens on the loopback address alone.

torch's own rendezvous (c10d) listens on all interfaces, asks nobody for a password, and unpickles what it finds in its
store: whoever reaches its port runs code. A `TCPStore` listens on all interfaces too, whatever its host name is, unless
it is given a socket.

    python -m tabicl_train.training.distributed.loopback --rdzv-backend loopback ...

is torchrun with this meeting point.
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
# The sockets by which the ranks exchange values; by default they listen on the address of the host's name.
# NCCL takes a name without "=" for the beginning of one. The last one says that each start has a store of its own.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def open_store() -> TCPStore:
    """Return a store for processes of this machine, on a free port."""
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single elastic agent; the ranks of each start find each other in a new store of the agent."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        if parameters.max_nodes > 1:
            raise ValueError(f"--rdzv-backend {BACKEND} is for one machine; use c10d for several")
        self.run_id = parameters.run_id
        os.environ.update(VARIABLES)  # which the ranks inherit

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks only connect to the store, instead of opening one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = open_store()
        # The agent starts the ranks next, and they inherit this: ctrl-C while Python starts in a rank would print a
        # stack trace, so it waits there until tabicl-train unblocks it. Here it waits for `num_nodes_waiting`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """Return how many machines want to join; the agent asks ten times a second from the start of the ranks on."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # if a rank has failed at once
        return True


def register_rendezvous() -> None:
    """Let torch's elastic agent find the rendezvous by its name."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)


if __name__ == "__main__":
    from torch.distributed.run import main

    register_rendezvous()
    main()
