"""A trainer replaces servers that fail, and knows what has to be done again."""

from random import Random

import attrs
import pytest
import torch

from optim.swarm.messages import Answer, Withdraw, Withdrawn
from optim.swarm.trainer import PipelineTrainer, Settings
from tests.optim.swarm.toys import PACKER, peer_id, sample, text_batch

SETTINGS = Settings(in_flight=2, patience=10.0, grace=2.0, retry=1.0)
VALUES = PACKER.pack(torch.ones(2, 12, 16), "fp32")
LOSSES = PACKER.pack(torch.ones(2), "fp32")


@pytest.fixture
def trainer():
    """Of three stages, with two servers each, before its only microbatch."""
    trainer = PipelineTrainer(3, Random(0), SETTINGS)
    for stage, router in enumerate(trainer.routers):
        for name in "ab":
            router.add(peer_id((stage, name)))
    trainer.begin(0, {0: sample(text_batch(0, 0))})
    return trainer


def answer_to(send, **changes):
    """What a server answers that does what it is asked for."""
    request = send.message
    values = None if request.kind == "backward" and send.stage == 0 else VALUES
    losses = LOSSES if (send.stage, request.kind) == (2, "backward") else None
    answer = Answer(step=request.step, number=request.number, values=values, losses=losses, counted=request.count)
    return attrs.evolve(answer, **changes)


def walk(trainer, until=None, now=0.0):
    """Answers everything up to and without a request (stage, kind); what was sent, and that request."""
    sent = []
    while sends := trainer.poll(now):
        (send,) = sends
        if (send.stage, send.message.kind) == until:
            return sent, send
        sent.append(send)
        trainer.answered(send.call, answer_to(send), now)
    return sent, None


def way(sent):
    return [(send.stage, send.message.kind, send.message.count) for send in sent]


WHOLE_WAY = [
    (0, "forward", False),
    (1, "forward", False),
    (2, "backward", True),
    (1, "backward", True),
    (0, "backward", True),
]


def test_a_microbatch_goes_forwards_and_backwards(trainer):
    sent, _ = walk(trainer)
    assert way(sent) == WHOLE_WAY
    assert sent[2].message.targets is not None
    assert trainer.idle
    assert trainer.wake is None


def test_there_are_only_so_many_in_flight(trainer):
    trainer.begin(0, {number: sample(text_batch(0, number)) for number in range(5)})
    sends = trainer.poll(0.0)
    assert [send.message.number for send in sends] == [0, 1]


@pytest.mark.parametrize("place", [(0, "forward"), (2, "backward"), (1, "backward"), (0, "backward")])
def test_a_server_that_fails_is_replaced_for_that_microbatch(trainer, place):
    _, send = walk(trainer, place)
    trainer.lost(send.peer)
    (again,) = trainer.poll(0.0)
    assert again.peer not in (send.peer,) and again.stage == send.stage
    assert attrs.asdict(again.message, recurse=False) == attrs.asdict(send.message, recurse=False)
    trainer.answered(send.call, answer_to(send), 0.0)  # too late
    trainer.answered(again.call, answer_to(again), 0.0)
    walk(trainer)
    assert trainer.idle


def test_a_refusal_is_a_failure(trainer):
    _, send = walk(trainer, (1, "forward"))
    trainer.failed(send.call, 0.0)
    (again,) = trainer.poll(0.0)
    assert again.peer != send.peer


@pytest.mark.parametrize(
    ("place", "sources"),
    [((0, "forward"), []), ((1, "forward"), [0]), ((2, "backward"), [1]), ((1, "backward"), [0, 2])],
)
def test_what_does_not_fit_takes_another_way_from_the_beginning(trainer, place, sources):
    sent, send = walk(trainer, place)
    trainer.failed(send.call, 0.0, misfit=True)
    assert trainer.poll(0.0) == []  # not at once: whoever is wrong may be wrong again
    assert trainer.wake is None or trainer.wake >= SETTINGS.retry
    again, _ = walk(trainer, now=SETTINGS.retry)
    assert [each[:2] for each in way(again)] == [each[:2] for each in WHOLE_WAY]
    wrong = {send.peer} | {one.peer for one in sent if one.stage in sources}
    assert not wrong & {one.peer for one in again if one.stage in (send.stage, *sources)}
    assert trainer.idle


def test_if_all_fail_the_stage_is_tried_again_later(trainer):
    _, send = walk(trainer, (1, "forward"))
    trainer.failed(send.call, 0.0)
    (again,) = trainer.poll(0.0)
    trainer.failed(again.call, 0.0)
    assert trainer.poll(0.0) == []
    assert trainer.wake == 1.0
    assert len(trainer.poll(1.0)) == 1


def test_a_stage_without_servers_is_waited_for(trainer):
    for name in "ab":
        trainer.lost(peer_id((1, name)))
    sent, _ = walk(trainer)
    assert way(sent) == WHOLE_WAY[:1]
    trainer.routers[1].add(peer_id("new"))
    sent, _ = walk(trainer, now=trainer.wake)
    assert way(sent) == WHOLE_WAY[1:]


def test_a_stalled_forward_pass_goes_elsewhere_at_once(trainer):
    _, send = walk(trainer, (1, "forward"))
    assert trainer.wake == 10.0
    (again,) = trainer.poll(10.0)
    assert again.peer != send.peer
    assert again.message.kind == "forward"


@pytest.fixture
def stalled(trainer):
    """A trainer that asks a stalled server of stage 1 whether it has counted: it, the request and the question."""
    _, send = walk(trainer, (1, "backward"))
    (question,) = trainer.poll(10.0)
    assert question.message == Withdraw(step=0, number=0)
    assert question.peer == send.peer
    return trainer, send, question


def test_what_a_stalled_server_has_not_counted_another_one_counts(stalled):
    trainer, send, question = stalled
    trainer.answered(question.call, Withdrawn(step=0, number=0, counted=False), 10.5)
    (again,) = trainer.poll(10.5)
    assert again.peer != send.peer
    assert again.message.count


def test_what_a_stalled_server_has_counted_another_one_only_computes(stalled):
    trainer, send, question = stalled
    trainer.answered(question.call, Withdrawn(step=0, number=0, counted=True), 10.5)
    (again,) = trainer.poll(10.5)
    assert again.peer != send.peer
    assert not again.message.count


def test_if_the_first_stage_has_counted_its_answer_is_not_needed(trainer):
    walk(trainer, (0, "backward"))
    (question,) = trainer.poll(10.0)
    trainer.answered(question.call, Withdrawn(step=0, number=0, counted=True), 10.5)
    assert trainer.poll(10.5) == []
    assert trainer.idle


def test_an_answer_that_comes_after_all_is_taken(stalled):
    trainer, send, question = stalled
    trainer.answered(send.call, answer_to(send), 11.0)
    (after,) = trainer.poll(11.0)
    assert (after.stage, after.message.kind) == (0, "backward")
    trainer.answered(question.call, Withdrawn(step=0, number=0, counted=True), 11.0)
    assert trainer.poll(11.0) == []


def test_if_a_stalled_server_says_nothing_another_one_counts(stalled):
    trainer, send, _ = stalled
    (again,) = trainer.poll(12.0)
    assert again.peer != send.peer
    assert again.message.count


def test_what_was_counted_by_a_server_that_is_gone_is_done_again_only_there(trainer):
    sent, _ = walk(trainer)
    trainer.lost(sent[3].peer)
    again, _ = walk(trainer)
    assert way(again) == [
        (0, "forward", False),
        (1, "forward", False),
        (2, "backward", False),
        (1, "backward", True),
    ]
    assert trainer.idle
    assert trainer.repeated == 1


def test_what_is_lost_behind_a_microbatch_on_its_way_is_done_after_it(trainer):
    sent, send = walk(trainer, (0, "backward"))
    trainer.lost(sent[2].peer)
    trainer.answered(send.call, answer_to(send), 0.0)
    again, _ = walk(trainer)
    assert way(again) == [(0, "forward", False), (1, "forward", False), (2, "backward", True)]


def test_what_a_settlement_lacks_is_done_again(trainer):
    walk(trainer)
    assert trainer.missing(1, 0, [0, 3]) == {3}
    again, _ = walk(trainer)
    assert (1, "backward", True) in way(again)


def test_what_was_counted_after_a_settlement_had_failed_is_not_missing(trainer):
    _, send = walk(trainer, (1, "backward"))
    trainer.answered(send.call, answer_to(send, attempt=1), 0.0)
    walk(trainer)
    trainer.missing(1, 0, [0])
    assert trainer.idle
    trainer.missing(1, 1, [0])
    assert not trainer.idle


def test_what_is_settled_cannot_be_lost(trainer):
    sent, _ = walk(trainer)
    trainer.settled(1)
    trainer.lost(sent[3].peer)
    assert trainer.idle


def test_a_microbatch_of_somebody_else_is_counted_only_where_it_is_missing(trainer):
    walk(trainer)
    trainer.add(3, sample(text_batch(0, 3)), [0])
    sent, _ = walk(trainer)
    assert way(sent) == [(stage, kind, count and stage == 0) for stage, kind, count in WHOLE_WAY]


def test_a_microbatch_without_finite_outputs_is_void_everywhere(trainer):
    _, send = walk(trainer, (1, "forward"))
    trainer.answered(send.call, answer_to(send, values=None, finite=False), 0.0)
    voids = []
    while sends := trainer.poll(0.0):
        voids += sends
        trainer.answered(sends[0].call, Answer(step=0, number=0, counted=True, finite=False), 0.0)
    assert [(send.stage, send.message.kind) for send in voids] == [(2, "void"), (1, "void"), (0, "void")]
    assert trainer.idle


def test_a_microbatch_without_finite_gradients_is_void_in_the_stages_before(trainer):
    _, send = walk(trainer, (1, "backward"))
    trainer.answered(send.call, answer_to(send, values=None, finite=False), 0.0)
    (void,) = trainer.poll(0.0)
    assert (void.stage, void.message.kind) == (0, "void")


@pytest.mark.parametrize(
    "changes",
    [
        {"values": None},
        {"number": 1},
        {"step": 1},
        {"counted": False},
        {"values": attrs.evolve(VALUES, shape=(3, 12, 16))},
    ],
)
def test_an_answer_that_does_not_fit_is_a_failure(trainer, changes):
    _, send = walk(trainer, (1, "backward"))
    trainer.answered(send.call, answer_to(send, **changes), 0.0)
    (again,) = trainer.poll(0.0)
    assert again.peer != send.peer
    assert again.stage == 1


def test_another_step_forgets_the_one_before(trainer):
    _, send = walk(trainer, (1, "backward"))
    trainer.begin(1, {1: sample(text_batch(1, 1))})
    trainer.answered(send.call, answer_to(send), 0.0)
    sent, _ = walk(trainer)
    assert {(send.message.step, send.message.number) for send in sent} == {(1, 1)}


def test_a_server_that_claims_to_have_counted_what_it_was_not_asked_to_is_not_believed(trainer):
    """Nor that so many settlements have failed that what it has counted can never be missing."""
    (send,) = trainer.poll(0.0)
    trainer.answered(send.call, answer_to(send, counted=True, attempt=2**40), 0.0)
    sent, _ = walk(trainer)
    assert (0, "backward", True) in way(sent)
    assert trainer.idle
    trainer.missing(0, 0, [0])
    assert not trainer.idle
    _, last = walk(trainer, (0, "backward"))
    trainer.answered(last.call, answer_to(last, attempt=2**40), 0.0)
    assert trainer.idle
    trainer.missing(0, 2, [0])
    assert not trainer.idle


@pytest.mark.parametrize(
    "losses",
    [
        None,
        attrs.evolve(LOSSES, data=LOSSES.data[:-1]),
        attrs.evolve(LOSSES, encoding="int8"),
        PACKER.pack(torch.ones(3), "fp32"),
        attrs.evolve(LOSSES, data=b"\xff" * len(LOSSES.data)),
    ],
)
def test_losses_that_make_no_sense_are_a_failure(trainer, losses):
    _, send = walk(trainer, (2, "backward"))
    trainer.answered(send.call, answer_to(send, losses=losses), 0.0)
    (again,) = trainer.poll(0.0)
    assert again.peer != send.peer
    trainer.answered(again.call, answer_to(again), 0.0)
    walk(trainer)
    assert trainer.losses == {0: [1.0, 1.0]}
