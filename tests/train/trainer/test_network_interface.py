"""The network interface of a run: the one that routes to the master; a master that no node can reach is an error."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import smelt
from smelt.errors import ResourceError
from smelt.train.trainer.distributed import find_interface, route_source, select_network_interface

LOOPBACK = ipaddress.ip_address("127.0.0.1")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment of two ranks on one node, and restore every variable afterwards."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GROUP_RANK"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    return monkeypatch


def loopback_interface() -> str:
    name = find_interface(LOOPBACK)
    assert name in {name for _, name in socket.if_nameindex()}
    assert name is not None
    return name


def test_interface_of_an_address_and_source_of_a_route() -> None:
    assert find_interface(ipaddress.ip_address("127.0.1.1")) == loopback_interface()
    assert find_interface(ipaddress.ip_address("192.0.2.1")) is None  # reserved for documentation: unreachable
    assert route_source(ipaddress.ip_address("127.0.0.5")).is_loopback


def test_one_node_uses_the_interface_that_routes_to_the_master(env: pytest.MonkeyPatch) -> None:
    select_network_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback_interface()
    assert "NCCL_SOCKET_IFNAME" not in os.environ  # NCCL needs no network inside one node


def test_an_interface_that_was_chosen_is_kept(env: pytest.MonkeyPatch) -> None:
    env.setenv("GLOO_SOCKET_IFNAME", "eth7")
    select_network_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_loopback_master_of_several_nodes_raises_cause_and_fix(env: pytest.MonkeyPatch) -> None:
    env.setenv("MASTER_ADDR", "localhost")
    env.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ResourceError) as caught:
        select_network_interface()
    message = str(caught.value)
    assert "the master's address localhost is the loopback address" in message and socket.gethostname() in message
    assert "--master-addr" in message and message.endswith("or correct /etc/hosts.")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_masters_own_node_may_resolve_it_to_loopback_if_an_interface_is_chosen(env: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", "1"), ("GLOO_SOCKET_IFNAME", "eth0"), ("GROUP_RANK", "0")):
        env.setenv(name, value)
    select_network_interface()
    env.setenv("GROUP_RANK", "1")
    with pytest.raises(ResourceError, match="loopback"):
        select_network_interface()


def test_an_unresolvable_master_is_named(env: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    env.setattr(socket, "getaddrinfo", unknown)
    env.setenv("MASTER_ADDR", "node-one")
    with pytest.raises(ResourceError, match=r"MASTER_ADDR is 'node-one', which this node cannot resolve \(.*known\)"):
        select_network_interface()


NODES = """
ip link set lo up
unshare -n sleep 300 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add eth0 type veth peer name eth1 netns $other
ip address add 10.77.1.1/24 dev eth0 && ip link set eth0 up
nsenter -n -t $other sh -c 'ip link set lo up; ip address add 10.77.1.2/24 dev eth1; ip link set eth1 up'
export MASTER_ADDR=10.77.1.1 MASTER_PORT=29555 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1
RANK=0 "$@" & first=$!
RANK=1 nsenter -n -t $other "$@" && wait $first
"""
RANK = """
import os
import torch
from smelt.train.trainer.distributed import init_distributed
init_distributed("cpu", 60.0)
total = torch.ones(1)
torch.distributed.all_reduce(total)
os.write(1, f"{os.environ['GLOO_SOCKET_IFNAME']} {int(total)}\\n".encode())  # print may write parts, which would mix
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_nodes_whose_names_resolve_to_loopback_find_each_other() -> None:
    """Two linked network namespaces; the host's own name resolves to loopback in both."""
    tools = all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter"))
    if not tools or subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not permitted here")
    environment = {**os.environ, "PYTHONPATH": str(Path(smelt.__file__).parents[1])}
    call = ["unshare", "-rn", "sh", "-c", NODES, "sh", sys.executable, "-c", RANK]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=280, env=environment)
    if "Operation not permitted" in done.stderr or "not supported" in done.stderr:
        pytest.skip("network namespaces cannot be joined by a cable here")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "eth0 2", "eth1 2"]
