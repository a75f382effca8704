"""Swarms of programs: peers that a script founds or joins, on real sockets."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager

import pytest
import torch
import trio
from torch import nn

from optim import DiLoCo
from peer import Swarm, open_swarm
from peer.contact import parse_contact
from peer.events import EventLog
from peer.helper import HelperConfig, run_helper
from peer.home import Home, HomeInUse
from peer.ticket import Ticket, TicketError
from protocol.background import in_background
from protocol.errors import (
    AddressError,
    Misfit,
    PeerUnreachable,
    RequestTimeout,
    RoundAborted,
    SettingsError,
    WrongSwarmKey,
)
from protocol.transport import Address

HERE = {"listen": "127.0.0.1:0", "map_port": False}


def together(*calls):
    """What the calls return, each made in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def two():
    with Swarm.found("a test", **HERE) as founder, Swarm.join(founder.ticket, **HERE) as other:
        together(lambda: founder.wait_for(2, timeout=30), lambda: other.wait_for(2, timeout=30))
        yield founder, other


def test_programs_that_have_a_ticket_average(two):
    founder, other = two
    assert set(founder.members) == set(other.members) == {founder.peer_id, other.peer_id}
    reduced = together(lambda: founder.all_reduce(torch.zeros(3)), lambda: other.all_reduce(torch.full((3,), 4.0)))
    assert [result.mean.tolist() for result in reduced] == [[2.0] * 3] * 2


def error_of(call):
    with pytest.raises(Misfit) as info:
        call()
    return str(info.value)


def test_programs_with_different_models_are_told(two):
    founder, other = two
    ten, twelve = together(
        lambda: error_of(lambda: founder.all_reduce(torch.zeros(10))),
        lambda: error_of(lambda: other.all_reduce(torch.zeros(12))),
    )
    assert f"{other.peer_id.short} (length: 10 here, 12 there)" in ten
    assert f"{founder.peer_id.short} (length: 12 here, 10 there)" in twelve
    assert "the same calls" in ten
    reduced = together(lambda: founder.all_reduce(torch.zeros(10)), lambda: other.all_reduce(torch.zeros(10)))
    assert all(len(result.members) == 2 for result in reduced)  # the mistake is mended


def test_optimizers_of_different_models_are_told(two):
    def train(swarm, width):
        model = nn.Linear(width, 1)
        optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.05), swarm, sync_every=2)
        for _ in range(2):
            model(torch.ones(width)).sum().backward()
            optimizer.step()

    told = together(lambda: error_of(lambda: train(two[0], 4)), lambda: error_of(lambda: train(two[1], 5)))
    assert "length: 5 here, 6 there" in told[0]
    assert "length: 6 here, 5 there" in told[1]


def test_another_codec_is_told_and_the_others_go_on_and_hear_of_it(tmp_path):
    with (
        Swarm.found("a test", events=tmp_path / "events", codec="int8", **HERE) as founder,
        Swarm.join(founder.ticket, codec="int8", **HERE) as second,
        Swarm.join(founder.ticket, **HERE) as wrong,
    ):
        peers = (founder, second, wrong)
        together(*(lambda peer=peer: peer.wait_for(3, timeout=30) for peer in peers))
        *made, told = together(
            lambda: founder.all_reduce(torch.ones(10)),
            lambda: second.all_reduce(torch.ones(10)),
            lambda: error_of(lambda: wrong.all_reduce(torch.ones(10))),
        )
        assert "codec: fp32 here, int8 there" in told
        assert [set(reduced.members) for reduced in made] == [{founder.peer_id, second.peer_id}] * 2
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "misfit")
    assert event["members"] == [str(wrong.peer_id)]
    assert event["reason"] == "codec: int8 here, fp32 there"


def test_a_training_loop_of_ones_own(two):
    def train(swarm, seed):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(4, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.05), swarm, sync_every=5)
        for _ in range(10):
            inputs = torch.randn(8, 4, generator=generator)
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    one, other = together(lambda: train(two[0], 1), lambda: train(two[1], 2))
    assert torch.equal(one, other)
    assert one.abs().sum() > 0


def test_a_third_comes_with_a_ticket_of_the_second_when_the_founder_is_gone(tmp_path):
    with ExitStack() as stack:
        with Swarm.found("a test", **HERE) as founder:
            second = stack.enter_context(Swarm.join(founder.ticket, **HERE))
            second.wait_for(2, timeout=30)
        third = stack.enter_context(Swarm.join(second.ticket, **HERE, events=tmp_path / "events"))
        third.wait_for(2, timeout=30)
        assert set(third.members) == {second.peer_id, third.peer_id}
        with pytest.raises(RequestTimeout, match="3 members"):
            third.wait_for(3, timeout=0.01)
    with pytest.raises(RoundAborted, match="ended"):
        third.barrier()
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert {"started", "peer_seen", "stopped"} <= {event["event"] for event in events}


def test_a_home_makes_it_the_same_peer_and_the_same_swarm_again(tmp_path):
    with Swarm.found("a test", home=tmp_path, **HERE) as founder:
        before, ticket = founder.peer_id, founder.ticket
        with pytest.raises(HomeInUse), Swarm.join(ticket, home=tmp_path, **HERE):
            pass
    with Swarm.found("a test", home=tmp_path, **HERE) as founder, Swarm.join(ticket, **HERE) as other:
        assert founder.peer_id == before
        other.wait_for(2, timeout=30)
    with Swarm.found("another", home=tmp_path, **HERE) as founder:
        assert Ticket.parse(founder.ticket, 0).run_id != Ticket.parse(ticket, 0).run_id


def test_a_program_whose_workers_live_on_can_begin_again(tmp_path, forked):
    """As a cell of a notebook that was interrupted, and left the workers of its data behind."""
    with Swarm.found("a test", home=tmp_path, **HERE) as founder, Swarm.join(founder.ticket, **HERE) as other:
        other.wait_for(2, timeout=30)
        (_, address) = first = Ticket.parse(founder.ticket, 0).bootstrap[0]
        forked()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port), timeout=60)
    with Swarm.found("a test", home=tmp_path, **HERE) as founder:
        assert Ticket.parse(founder.ticket, 0).bootstrap[0] == first


def test_members_meet_through_a_helper(tmp_path):
    """Neither knows the other's address: each knows the helper, and what is published there."""
    home = Home(tmp_path / "helper")

    @asynccontextmanager
    async def helper():
        config = HelperConfig(home=home, listen=Address("127.0.0.1", 0), events=EventLog(None, "helper"))
        async with trio.open_nursery() as nursery:
            yield await nursery.start(run_helper, config)
            nursery.cancel_scope.cancel()

    with in_background(helper) as (contact, _), ExitStack() as stack:
        founder = stack.enter_context(Swarm.found("a test", private=False, bootstrap=[contact], **HERE))
        run_id = Ticket.parse(founder.ticket, 0).run_id
        other = stack.enter_context(Swarm.join(Ticket(run_id, (parse_contact(contact),)).encode(), **HERE))
        together(lambda: founder.wait_for(2, timeout=60), lambda: other.wait_for(2, timeout=60))


async def test_the_same_for_programs_with_trio():
    async with open_swarm(name="a test", **HERE) as founder, open_swarm(founder.ticket, **HERE) as other:
        await founder.wait_for(2)
        await other.wait_for(2)
        results = []

        async def reduce(swarm, value):
            results.append((await swarm.all_reduce(torch.tensor([value]))).mean.item())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce, founder, 1.0)
            nursery.start_soon(reduce, other, 2.0)
        assert results == [1.5, 1.5]


async def test_errors_of_the_block_come_out_as_they_are():
    with pytest.raises(ZeroDivisionError):
        async with open_swarm(**HERE):
            raise ZeroDivisionError


def test_what_is_wrong_with_a_ticket():
    with pytest.raises(TicketError), Swarm.join("shoal:nonsense", **HERE):
        pass
    with Swarm.found("a test", **HERE) as founder:
        ticket = founder.ticket
        stranger = Ticket(Ticket.parse(ticket, 0).run_id, Ticket.parse(ticket, 0).bootstrap, bytes(32)).encode()
        with pytest.raises(WrongSwarmKey), Swarm.join(stranger, **HERE):
            pass
    with pytest.raises(PeerUnreachable, match="the only known peer"), Swarm.join(ticket, **HERE):
        pass
    assert not any(thread.name == "shoal" for thread in threading.enumerate())


def test_a_fault_of_the_swarm_comes_to_light(monkeypatch):
    from peer import swarm as module

    async def fail(*arguments):
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    monkeypatch.setattr(module, "_search", fail)
    with pytest.raises(RoundAborted, match="fault") as caught, Swarm.found("a test", **HERE) as founder:
        founder.barrier()
        founder.wait_for(2)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_uplaod": 5}, TypeError, "max_upload"),
        ({"codec": "int3"}, SettingsError, "int3"),
        ({"max_upload": "4M"}, TypeError, "str"),
        ({"listen": "nowhere"}, AddressError, "nowhere"),
        ({"bootstrap": ["somebody"]}, AddressError, "somebody"),
    ],
)
def test_options_that_make_no_sense(options, error, words):
    with pytest.raises(error, match=words), Swarm.found("a test", **{**HERE, **options}):
        pass


def test_a_ticket_that_is_not_there():
    with pytest.raises(TicketError, match="None"), Swarm.join(None, **HERE):
        pass
