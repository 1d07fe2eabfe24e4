"""Hosts of a cluster on this machine: each has its own network, name and process numbers, and dies as a whole."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CAN_MAKE_HOSTS = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")
BRIDGE = "tabicl-bridge"
SETUP = 'mount --bind "$HOSTS" /etc/hosts; hostname "$NAME"; mount -t proc proc /proc; ip link set lo up; exec "$@"'


class Hosts:
    """Hosts that reach each other through the interface eth0.

    folder: for a file with their names and addresses
    """

    def __init__(self, names: list[str], folder: Path) -> None:
        self.started: list[subprocess.Popen] = []
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self.file = folder / "hosts"
        lines = [f"{address} {name}" for name, address in self.addresses.items()]
        self.file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(self, name: str, command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen:
        """Start a host with a command. When the process that is returned is killed, so is everything on the host."""
        with open(log, "a") as file:
            host = subprocess.Popen(
                ["ip", "netns", "exec", f"tabicl-{name}", "unshare", "--mount", "--uts", "--pid", "--fork",
                 "--kill-child", "bash", "-c", SETUP, "host", *command],
                env=env | {"HOSTS": str(self.file), "NAME": name, "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=file, stderr=file,
            )  # fmt: skip
        self.started.append(host)
        return host


@contextlib.contextmanager
def hosts(names: list[str], folder: Path) -> Iterator[Hosts]:
    """Network namespaces whose interfaces are ports of one bridge; removed at the end."""
    group = Hosts(names, folder)
    remove(names)  # what a killed test has left
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for name, address in group.addresses.items():
            space, port = f"tabicl-{name}", f"tabicl-{name}"
            ip("netns", "add", space)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", port, "master", BRIDGE, "up")
            ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
        yield group
    finally:
        for host in group.started:
            host.kill()
            host.wait()
        remove(names)


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", f"tabicl-{name}"], capture_output=True)
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
