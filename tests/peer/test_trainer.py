"""The local part of training, on a model of a few thousand parameters."""

import hashlib
import math
import types

import attrs
import pytest
import torch

from peer.data import Corpus
from peer.model import Transformer
from peer.settings import (
    AlgorithmSettings,
    DataSettings,
    InnerSettings,
    LimitSettings,
    ModelSettings,
    RunSettings,
    Settings,
)
from peer.trainer import Trainer, default_threads, sample_text
from protocol.collective import Reduced
from protocol.errors import DataError, SettingsError
from protocol.identity import PeerId

SETTINGS = Settings(
    run=RunSettings(seed=3),
    model=ModelSettings(layers=1, width=16, heads=2, context=16),
    data=DataSettings(shards=8, validation=0.1),
    inner=InnerSettings(lr=1e-2, warmup=4, batch=4),
    algorithm=AlgorithmSettings(inner_steps=5, outer_lr=0.7, outer_momentum=0.5),
)
TOKENS = 4 * 16


def never():
    return False


def ignore(info):
    pass


def reduced(mean, weight=1.0):
    """What comes of a round with this mean, as far as it matters here."""
    plan = types.SimpleNamespace(operation="reduce")
    return Reduced(
        plan=plan, attempts=1, bytes_sent=0, bytes_received=0, seconds=0.0, mean=mean, contributors=(), weight=weight
    )


def peer(index):
    return PeerId(hashlib.sha256(bytes([index])).digest())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices are slower on many threads, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_threads_that_nobody_asked_for(monkeypatch):
    large = ModelSettings(layers=8, width=512)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    assert (default_threads(ModelSettings()), default_threads(large)) == (1, 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # PyTorch has read it
    assert (default_threads(ModelSettings()), default_threads(large)) == (6, 6)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {index}: the sheep are {index * 7 % 100}\n" for index in range(2000)))
    return Corpus.open(path)


@pytest.fixture
def make(corpus):
    def make(settings=SETTINGS, index=0):
        return Trainer(settings, corpus, peer(index))

    return make


def train_round(trainer, state, revision, members=(), steps=5):
    infos = []
    trainer.start_round(state, revision, members)
    trainer.run(steps, should_stop=never, on_step=infos.append)
    return infos


def test_the_initial_state_follows_from_the_seed(make):
    one, other = make().initial_state(), make(index=1).initial_state()
    assert torch.equal(one.parameters, other.parameters)
    assert one.parameters.shape == (sum(p.numel() for p in Transformer(SETTINGS.model).parameters()),)
    reseeded = make(attrs.evolve(SETTINGS, run=RunSettings(seed=4))).initial_state()
    assert not torch.equal(one.parameters, reseeded.parameters)


def test_rounds_of_several_peers_learn(make):
    members = [peer(0), peer(1)]
    trainers = [make(index=index) for index in range(2)]
    state = trainers[0].initial_state()
    before = trainers[0].evaluate(state)
    for revision in range(1, 5):
        for trainer in trainers:
            train_round(trainer, state, revision, members, steps=10)
        brought = [trainer.contribution() for trainer in trainers]
        mean = (brought[0].operation.values + brought[1].operation.values) / 2
        following = [trainer.commit(state, reduced(mean), revision) for trainer in trainers]
        assert torch.equal(following[0].parameters, following[1].parameters)
        state = following[0]
    assert before == pytest.approx(math.log(256), abs=0.3)
    assert trainers[0].evaluate(state) < before - 1.5


def test_a_round_begins_at_the_outer_parameters(make):
    trainer = make()
    state = trainer.initial_state()
    train_round(trainer, state, 1)
    assert not torch.equal(trainer.flat.read(), state.parameters)
    trainer.start_round(state, 2, [])
    assert torch.equal(trainer.flat.read(), state.parameters)


def test_what_was_trained_on_a_branch_that_is_given_up_comes_along(make):
    """As the same change, from the other branch's parameters, and with its weight. More steps are not needed."""
    trainer = make()
    state = trainer.initial_state()
    train_round(trainer, state, 1)
    before = trainer.contribution()
    other = attrs.evolve(state, parameters=state.parameters + 1)
    trainer.carry_over()
    assert train_round(trainer, other, 7) == []
    after = trainer.contribution()
    assert torch.allclose(after.operation.values, before.operation.values, atol=1e-6)
    assert (after.weight, after.steps, after.finite) == (before.weight, before.steps, True)
    assert len(train_round(trainer, other, 8)) == 5  # once only
    assert not torch.equal(trainer.contribution().operation.values, after.operation.values)


def test_half_a_round_comes_along_and_is_finished(make):
    trainer = make()
    state = trainer.initial_state()
    trainer.start_round(state, 1, [])
    trainer.run(2, should_stop=never, on_step=ignore)
    trainer.carry_over()
    assert len(train_round(trainer, attrs.evolve(state, parameters=state.parameters * 2), 1)) == 3
    assert trainer.contribution().steps == 5


def test_nothing_comes_along_of_what_is_not_finite_or_not_there(make):
    trainer = make()
    state = trainer.initial_state()
    trainer.carry_over()
    trainer.start_round(state, 1, [])
    assert torch.equal(trainer.flat.read(), state.parameters)
    train_round(trainer, attrs.evolve(state, parameters=state.parameters * float("nan")), 1)
    trainer.carry_over()
    trainer.start_round(state, 2, [])
    assert torch.equal(trainer.flat.read(), state.parameters)
    assert trainer.contribution().finite


def test_a_contribution_is_old_minus_new_with_its_tokens_as_weight(make):
    trainer = make()
    state = trainer.initial_state()
    train_round(trainer, state, 1)
    contribution = trainer.contribution()
    assert torch.equal(contribution.operation.values, state.parameters - trainer.flat.read())
    assert (contribution.weight, contribution.steps, contribution.finite) == (5 * TOKENS, 5, True)


def test_a_peer_that_did_nothing_weighs_nothing(make):
    trainer = make()
    trainer.start_round(trainer.initial_state(), 1, [])
    contribution = trainer.contribution()
    assert (contribution.weight, contribution.steps, contribution.finite) == (0.0, 0, True)
    assert not contribution.operation.values.any()


def test_a_contribution_weighs_no_more_than_the_run_allows(make):
    trainer = make(attrs.evolve(SETTINGS, limits=LimitSettings(weight=100.0)))
    train_round(trainer, trainer.initial_state(), 1)
    assert trainer.contribution().weight == 100.0


def test_a_round_can_be_interrupted_and_continued_with_the_same_result(make):
    whole, halves = make(), make()
    state = whole.initial_state()
    train_round(whole, state, 1)

    seen = []
    halves.start_round(state, 1, [])
    halves.run(5, should_stop=lambda: len(seen) >= 2, on_step=seen.append)
    assert len(seen) == 2
    assert halves.contribution().steps == 2
    halves.run(5, should_stop=never, on_step=seen.append)
    halves.run(5, should_stop=never, on_step=seen.append)
    assert len(seen) == 5
    assert torch.equal(halves.flat.read(), whole.flat.read())


def test_steps_are_reported(make):
    trainer = make()
    infos = train_round(trainer, trainer.initial_state(), 3)
    assert [info.step for info in infos] == [11, 12, 13, 14, 15]
    assert all(info.tokens == TOKENS and info.loss > 0 for info in infos)


def test_the_schedule_goes_by_the_steps_of_the_run(make):
    trainer = make()
    state = trainer.initial_state()
    assert [i.lr for i in train_round(trainer, state, 1)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    # A joiner in a later round does not warm up again.
    assert [i.lr for i in train_round(make(), state, 2)] == pytest.approx([0.01] * 5)


def test_a_run_of_known_length_cools_down_to_a_tenth(make):
    trainer = make(attrs.evolve(SETTINGS, run=RunSettings(seed=3, rounds=4)))
    state = trainer.initial_state()
    rates = [info.lr for revision in range(1, 5) for info in train_round(trainer, state, revision)]
    assert rates[3] == pytest.approx(0.01)
    assert rates[12] == pytest.approx(0.001 + 0.009 * 0.5 * (1 + math.cos(math.pi * 8 / 16)))
    assert rates[4:] == sorted(rates[4:], reverse=True)
    (extra,) = train_round(trainer, state, 5, steps=1)
    assert extra.lr == pytest.approx(0.001)


def test_a_run_is_the_plain_loop_bit_for_bit(make, corpus):
    trainer = make()
    state = trainer.initial_state()
    for revision in (1, 2):
        train_round(trainer, state, revision)

    model = Transformer(SETTINGS.model, seed=3)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    inner = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for revision in (1, 2):
        model.load_state_dict(start)
        stream = trainer._data.training_batches(peer(0), [], revision, 4)
        for step in range(5):
            for group in inner.param_groups:
                group["lr"] = 1e-2 * min(1.0, ((revision - 1) * 5 + step + 1) / 4)
            windows = next(stream)
            inner.zero_grad()
            logits = model(windows[:, :-1])
            torch.nn.functional.cross_entropy(logits.reshape(-1, 256), windows[:, 1:].reshape(-1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(trainer.flat.read(), expected)


def test_moments_live_through_rounds_and_are_saved_and_restored(make):
    trainer = make()
    state = trainer.initial_state()
    assert trainer.inner_state() == {}
    train_round(trainer, state, 1)
    saved = trainer.inner_state()
    assert saved.keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert saved["exp_avg"].shape == state.parameters.shape
    assert saved["step"].item() == 5

    resumed = make()
    resumed.restore_inner(saved)
    for each in (trainer, resumed):
        train_round(each, state, 2)
    assert torch.equal(trainer.flat.read(), resumed.flat.read())
    assert trainer.inner_state()["step"].item() == 10
    assert saved["step"].item() == 5

    fresh = make()
    train_round(fresh, state, 2)
    assert not torch.equal(fresh.flat.read(), resumed.flat.read())
    emptied = make()
    emptied.restore_inner(saved)
    emptied.restore_inner({})
    assert emptied.inner_state() == {}
    train_round(emptied, state, 2)
    assert torch.equal(fresh.flat.read(), emptied.flat.read())


def test_moments_of_another_model_are_refused(make):
    trainer = make()
    with pytest.raises(SettingsError, match="trainable values"):
        trainer.restore_inner({"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.tensor(1.0)})
    with pytest.raises(SettingsError, match="exp_avg"):
        trainer.restore_inner({"momentum": torch.zeros(3)})
    train_round(trainer, trainer.initial_state(), 1)
    saved = trainer.inner_state()
    for name in saved:
        with pytest.raises(SettingsError, match=r"the saved .* is not finite"):
            trainer.restore_inner({**saved, name: saved[name] * float("nan")})
    with pytest.raises(SettingsError, match="number of steps has shape"):
        trainer.restore_inner({**saved, "step": torch.ones(3)})


def test_a_state_that_is_not_a_number_makes_a_contribution_of_nothing_and_is_outlived(make):
    trainer = make()
    state = trainer.initial_state()
    infos = train_round(trainer, attrs.evolve(state, parameters=state.parameters * float("nan")), 1)
    assert infos == []
    contribution = trainer.contribution()
    assert (contribution.weight, contribution.finite) == (0.0, False)
    assert not contribution.operation.values.any()
    assert len(train_round(trainer, state, 2)) == 5
    assert trainer.contribution().finite


def test_values_that_stop_being_finite_after_the_last_step_do_not_count(make):
    trainer = make()
    train_round(trainer, trainer.initial_state(), 1)
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("inf")
    contribution = trainer.contribution()
    assert (contribution.weight, contribution.steps, contribution.finite) == (0.0, 5, False)
    assert not contribution.operation.values.any()


def test_evaluation_is_repeatable_and_disturbs_nothing(make):
    trainer = make()
    state = trainer.initial_state()
    train_round(trainer, state, 1)
    fast, moments = trainer.flat.read(), trainer.inner_state()["exp_avg"]
    losses = {trainer.evaluate(state) for _ in range(2)}
    assert losses == {make(index=1).evaluate(state)}
    assert torch.equal(trainer.flat.read(), fast)
    assert torch.equal(trainer.inner_state()["exp_avg"], moments)


def test_samples_follow_the_prompt_and_the_seed(make):
    trainer = make()
    state = trainer.initial_state()
    text = trainer.sample(state, b"the ", 30, temperature=1.0, seed=1)
    assert len(text) == 30
    assert trainer.sample(state, b"the ", 30, temperature=1.0, seed=1) == text
    assert trainer.sample(state, b"the ", 30, temperature=1.0, seed=2) != text
    assert sample_text(SETTINGS, state, b"the ", 30, temperature=1.0, seed=1) == text
    assert len(trainer.sample(state, b"", 3)) == 3
    assert trainer.sample(state, b"a", 5, temperature=0, seed=1) == trainer.sample(
        state, b"a", 5, temperature=0, seed=2
    )
    with pytest.raises(SettingsError, match="temperature"):
        trainer.sample(state, b"a", 5, temperature=-1.0)


def test_settings_that_cannot_work_are_refused(make):
    with pytest.raises(SettingsError, match="heads"):
        make(attrs.evolve(SETTINGS, model=ModelSettings(width=16, heads=3)))
    with pytest.raises(DataError, match="too small"):
        make(attrs.evolve(SETTINGS, model=ModelSettings(layers=1, width=16, heads=2, context=65536)))


def test_to_run_before_a_round_is_a_mistake(make):
    with pytest.raises(RuntimeError, match="start_round"):
        make().run(1, should_stop=never, on_step=ignore)


def test_a_state_of_another_model_is_refused(make):
    trainer = make()
    state = trainer.initial_state()
    with pytest.raises(SettingsError, match="trainable values"):
        trainer.start_round(attrs.evolve(state, parameters=state.parameters[:-1]), 1, [])
