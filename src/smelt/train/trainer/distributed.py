"""Join the process group, and leave it: when one rank is lost the others end with one sentence and do not hang.

gloo finds its network interface by resolving the host's own name, which on many machines is a loopback address that no
other node can reach. Unless the user has chosen one, the interface here is the one that routes to the master.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed

from smelt.errors import ResourceError

RANK_LOST = "another rank has ended or does not answer"
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux ioctl: the IPv4 address of an interface
_reported = threading.Lock()  # taken by the first error message: a process reports why it ends once

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class LostWorkerError(ResourceError):
    """Another rank has ended; not this one's fault."""


def backend_for(on_gpu: bool) -> str:
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # ranks agree through tensors in CPU memory


def init_distributed(device: str, timeout: float) -> torch.device:
    """Join the ranks that torchrun has started and return this rank's device; without torchrun there is a single rank.

    `device`: cpu, cuda or auto.
    """
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_gpu and not torch.cuda.is_available():
        raise ResourceError("there is no GPU here; set device to cpu or auto.")
    local_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(local_device)
    backend, group_timeout = backend_for(on_gpu), timedelta(seconds=timeout)
    if "WORLD_SIZE" not in os.environ:
        store = distributed.HashStore()
        distributed.init_process_group(backend, timeout=group_timeout, store=store, rank=0, world_size=1)
        return local_device
    select_network_interface()
    try:
        distributed.init_process_group(backend, timeout=group_timeout)
    except (ValueError, RuntimeError) as error:
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        interface = os.environ.get(_GLOO_INTERFACE)
        raise ResourceError(
            f"the ranks could not connect to each other through {master}"
            f"{f' on network interface {interface}' if interface else ''} ({_first_line(error)}); start them with "
            "torchrun, and on several nodes check that each can reach the master's address and the others' ports."
        ) from error
    return local_device


def select_network_interface() -> None:
    """Let gloo and NCCL use the interface that routes to the master, unless the environment names one already.

    Ends with an error if the ranks are on several nodes and the master's address is a loopback address here.
    """
    host = os.environ.get("MASTER_ADDR")
    if host is None:
        return  # init_process_group says what is missing
    master = _resolve(host)
    world_size = int(os.environ["WORLD_SIZE"])
    several_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size
    if several_nodes and master.is_loopback:
        on_master = os.environ.get("GROUP_RANK") == "0"
        if on_master and _GLOO_INTERFACE in os.environ:
            return  # the other nodes may resolve the name to an address they can reach
        raise ResourceError(
            f"the ranks are on several nodes, but on this one ({socket.gethostname()}) the master's address {host} is "
            f"the loopback address {master}, which no other node can reach; start torchrun with --master-addr (or "
            "--local-addr) set to an address of the master that all nodes reach, or correct /etc/hosts."
        )
    interface = find_interface(route_source(master))
    if interface is None:
        return
    os.environ.setdefault(_GLOO_INTERFACE, interface)
    if several_nodes:
        os.environ.setdefault(_NCCL_INTERFACE, f"={interface}")  # = is an exact match


def route_source(address: IPAddress) -> IPAddress:
    """Return the local address from which packets to `address` are sent; nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError as error:
            raise ResourceError(
                f"this node has no route to the master's address {address} ({error.strerror}); give torchrun a "
                "--master-addr that all nodes reach."
            ) from error
        return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])


def find_interface(address: IPAddress) -> str | None:
    """Return the name of the network interface with this address; None if it cannot be determined."""
    if address.version == 6:
        with suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if ipaddress.IPv6Address(int(digits, 16)) == address:
                    return name
        return None
    if address.is_loopback:  # all of 127.0.0.0/8 belongs to the interface with 127.0.0.1
        address = ipaddress.ip_address("127.0.0.1")
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(control.fileno(), _SIOCGIFADDR, request)
                if ipaddress.IPv4Address(answer[20:24]) == address:
                    return name
    return None


def _resolve(host: str) -> IPAddress:
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"MASTER_ADDR is {host!r}, which this node cannot resolve ({_first_line(error)}); give torchrun a "
            "--master-addr that all nodes reach."
        ) from error


@contextmanager
def report_lost_workers(resume_hint: Callable[[], str]) -> Iterator[None]:
    """Turn an error of the connection between ranks into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if not _is_connection_error(error):
            raise
        raise LostWorkerError(f"{RANK_LOST}, so this one stops too; {resume_hint()}") from error


def _is_connection_error(error: RuntimeError) -> bool:
    """gloo has no exception class of its own, but names its source file in the message."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def _first_line(error: Exception) -> str:
    """Return the sentence of an error without the C++ stack trace that torch appends."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition("Exception raised from")[0].strip().rstrip(".")


def print_error(sentence: str) -> None:
    """Print the reason why this process ends to standard error, unless it has printed one."""
    if _reported.acquire(blocking=False):
        print(f"smelt: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def exit_on_signal(resume_hint: Callable[[], str]) -> None:
    """End the process with a sentence on Ctrl-C and on SIGTERM, which torchrun sends to all when one rank has died.

    A thread waits for the signal, since the main one may be inside a collective that never returns.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while True:
            number = os.read(read_end, 1)[0]
            if number in (signal.SIGTERM, signal.SIGINT):
                reason = "stopped" if number == signal.SIGINT else f"stopped by SIGTERM, as when {RANK_LOST}"
                print_error(f"{reason}; {resume_hint()}")
                os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()
