"""The network interface by which a rank's gloo is reached. Runs on the rank's node."""

import os
import socket

from osdp_ray.errors import ClusterError


def choose_interface(node_address: str) -> None:
    """Has gloo use the interface of the node's address. Raises ClusterError where the user chose another that is local.

    Ranks that are told a loopback address connect to themselves, and blame one another.
    """
    interface = interface_of(node_address)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is None or interface is None:
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        return
    names = addresses_of(chosen)
    if not names or (interface != chosen and all(name.startswith(("127.", "::1")) for name in names)):
        raise ClusterError(
            f"GLOO_SOCKET_IFNAME is {chosen!r} on node {socket.gethostname()} ({node_address}), "
            + (f"which is {names[0]} and reached by no other node" if names else "and there is no such interface"),
            f"Unset it there, or set it to {interface!r}.",
        )


def addresses_of(interface: str) -> list[str]:
    """The IP addresses of a network interface of this machine, [] where there is none of that name."""
    import psutil  # ray carries it

    families = (socket.AF_INET, socket.AF_INET6)
    return [entry.address for entry in psutil.net_if_addrs().get(interface, ()) if entry.family in families]


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IP address, None where none has it.

    gloo by itself takes the address of the host's name, which often is a loopback that other nodes cannot reach.
    All of 127.0.0.0/8 is the loopback interface's.
    """
    import psutil  # ray carries it, and puts it on the path when ray is imported

    wanted = "127.0.0.1" if address.startswith("127.") else address
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == wanted for entry in entries):
            return name
    return None
