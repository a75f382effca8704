import string
import tomllib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.algorithm import METHODS, names
from peer.manifest import (
    MAX_MANIFEST,
    NOTES,
    Manifest,
    ManifestError,
    dump_settings,
    parse_settings,
    settings_from,
    warnings,
)
from peer.settings import (
    AlgorithmSettings,
    InnerSettings,
    LimitSettings,
    MembershipSettings,
    ModelSettings,
    RoundSettings,
    RunSettings,
    Settings,
)
from protocol.codecs import NAMES
from protocol.identity import Identity, PeerId

FOUNDER = Identity.from_seed(bytes(32))
OTHER = Identity.from_seed(b"\1" * 32)


def finite(low, high, **options):
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **options)


texts = st.text(min_size=1, max_size=64).filter(str.isprintable)
memberships = st.one_of(
    st.sampled_from([MembershipSettings(), MembershipSettings(policy="private")]),
    st.lists(st.binary(min_size=32, max_size=32).map(PeerId).map(str), min_size=1, max_size=5).map(
        lambda peers: MembershipSettings(policy="allow", allow=tuple(peers))
    ),
)
settings = st.builds(
    Settings,
    run=st.builds(RunSettings, name=texts, seed=st.integers(0, 2**63 - 1), rounds=st.integers(0, 2**31 - 1)),
    model=st.builds(
        lambda heads, pairs: ModelSettings(heads=heads, width=heads * pairs * 2),
        st.integers(1, 64),
        st.integers(4, 100),
    ),
    inner=st.builds(
        InnerSettings,
        lr=finite(0, 10, exclude_min=True),
        betas=st.tuples(finite(0, 1, exclude_max=True), finite(0, 1, exclude_max=True)),
        clip=finite(0, 1e300, exclude_min=True),
    ),
    algorithm=st.one_of(
        st.sampled_from([name for name in names() if name != "quadratic"]).map(AlgorithmSettings),
        st.builds(AlgorithmSettings, outer_momentum=finite(0, 1, exclude_max=True)),
    ),
    round=st.builds(RoundSettings, grace=finite(1, 86400), codec=st.sampled_from(NAMES)),
    membership=memberships,
)


@given(settings)
def test_a_manifest_survives_its_text(settings):
    manifest = Manifest.create(settings, FOUNDER)
    again = Manifest.parse(manifest.dump())
    assert again == manifest
    assert again.settings == settings
    assert again.run_id == manifest.run_id


@given(settings, st.booleans())
def test_settings_survive_their_text(settings, notes):
    assert parse_settings(dump_settings(settings, notes=notes)) == settings


@given(settings, settings)
def test_run_ids_differ_exactly_when_settings_do(one, other):
    ids = [Manifest.create(each, FOUNDER).run_id for each in (one, other)]
    assert (ids[0] == ids[1]) == (one == other)


def test_the_run_id_depends_on_the_founder_and_is_fixed():
    manifest = Manifest.create(Settings(), FOUNDER)
    assert manifest.run_id != Manifest.create(Settings(), OTHER).run_id
    assert manifest == Manifest.create(Settings(), FOUNDER)
    # Peers of different versions must agree on it.
    assert manifest.run_id.hex() == "ff890f0ae5b00bead0d56f18d86312f56bc0d5845eb5345789737f1aa7461001"
    assert manifest.founder_id == FOUNDER.peer_id


def test_the_run_id_is_about_meaning_not_text():
    plain = settings_from({"round": {"grace": 10.0}, "inner": {"weight_decay": 0.0}})
    other = settings_from({"inner": {"weight_decay": -0.0}, "round": {"grace": 10}})
    assert Manifest.create(plain, FOUNDER).run_id == Manifest.create(other, FOUNDER).run_id


@given(st.data())
def test_no_changed_manifest_is_accepted(data):
    text = Manifest.create(Settings(), FOUNDER).dump()
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.sampled_from(string.printable))
    changed = text[:place] + character + text[place + 1 :]
    try:
        manifest = Manifest.parse(changed)
    except ManifestError as error:
        assert "\n" not in str(error)
    else:
        assert manifest.dump() == text  # white space, or another spelling of the same value


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("latin-1")))
def test_garbage_is_refused_in_one_line(text):
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(text)
    assert "\n" not in str(caught.value)


tables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
keys = st.sampled_from(sorted(NOTES))


@given(keys, tables)
def test_any_value_is_taken_or_refused_by_name(key, value):
    table, name = key.split(".")
    try:
        assert isinstance(settings_from({table: {name: value}}), Settings)
    except ManifestError as error:
        assert str(error).removeprefix("unknown key ").startswith(table)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[modle]\nlayers = 1", "unknown table modle", "did you mean model?"),
        ("[model]\nlayer = 1", "unknown key model.layer", "did you mean model.layers?"),
        ("[run]\nxyzzy = 1", "unknown key run.xyzzy", "known are name, seed, rounds"),
        ("model = 3", "model must be a table", None),
        ("[model]\nlayers = 0", "model.layers = 0: must be >= 1", None),
        ('[model]\nlayers = "four"', 'model.layers = "four": expected int, got str', None),
        ("[run]\nrounds = true", "run.rounds = true: expected int, got bool", None),
        ("[inner]\nclip = inf", "inner.clip = inf: must be a finite number", None),
        ("[inner]\nlr = nan", "inner.lr = nan: must be a finite number", None),
        ("[inner]\nbetas = [0.9, 1.0]", "inner.betas = […]: betas are two numbers in [0, 1)", None),
        ('[algorithm]\nname = "dilico"', 'algorithm.name = "dilico": must be "diloco" or', 'did you mean "diloco"?'),
        ("[algorithm]\nname = 3", "algorithm.name = 3: must be", None),
        (
            '[algorithm]\nname = "asynchronous"\ngrace = 11.0',
            "algorithm.grace = 11: must be <= round.grace = 10",
            "nobody waits longer than that: it is for how long too few wait for more",
        ),
        ('[algorithm]\nname = "demo"', 'algorithm.name = "demo": cannot be used in a run: it exchanges in every', None),
        ("[algorithm]\ninner_step = 3", "unknown key algorithm.inner_step", "did you mean algorithm.inner_steps?"),
        ("[algorithm]\nfragments = 3", "unknown key algorithm.fragments", "known are name, inner_steps"),
        ("[algorithm]\ninner_steps = 1.5", "algorithm.inner_steps = 1.5: expected int, got float", None),
        ("[algorithm]\ninner_steps = 0", "algorithm.inner_steps = 0: must be >= 1", None),
        ("[algorithm]\ninner_steps = 99999999", "algorithm.inner_steps = 99999999: must be <= 16777216", None),
        ("[algorithm]\nouter_lr = 11", "algorithm.outer_lr = 11: must be <= 10", None),
        ("[algorithm]\nouter_momentum = 1", "algorithm.outer_momentum = 1.0: must be < 1", None),
        (
            '[algorithm]\nname = "streaming"\ninner_steps = 9\nfragments = 2',
            "algorithm.inner_steps = 9: 2 fragments cannot take turns evenly in 9 steps",
            "use a multiple of 2 inner steps, or fewer fragments",
        ),
        (
            '[algorithm]\nname = "streaming"\ndelay = 51',
            "algorithm.delay = 51: a delay of 51 steps is longer than the 50 from one exchange to the next "
            "(2 fragments take turns in 100)",
            "a result is applied so long after its exchange began, before the next one begins: use a delay",
        ),
        ('[algorithm]\nname = "streaming"\ndelay = -1', "algorithm.delay = -1: must be >= 0", None),
        ('[algorithm]\nname = "fedopt"\nrule = "sgd"', 'algorithm.rule = "sgd": must be "adam" or "yogi"', None),
        ('[algorithm]\nname = "noloco"\nalpha = 0.9', "algorithm.alpha = 0.9: must be <= 0.6", None),
        (
            '[algorithm]\nname = "eager"\nouter_lr = 0.7',
            "algorithm.outer_lr = 0.7: eager updates with an outer learning rate of 0.7 and a momentum of 0.5 diverge",
            "choose 0.35 and 0.5 at most for eager updates",
        ),
        (
            '[algorithm]\nname = "delayed"\nouter_lr = 0.35\nouter_momentum = 0.9',
            "algorithm.outer_lr = 0.35, algorithm.outer_momentum = 0.9: delayed updates",
            None,
        ),
        ('[algorithm]\nname = "quadratic"\nalpha = 50.0', "algorithm.alpha = 50: too large for inner.lr", None),
        (
            '[model]\nlayers = 4\n[algorithm]\nname = "swarm"\nstages = 77',
            "algorithm.stages = 77: must be <= 6 for model.layers = 4",
            "each layer, the embedding and the output",
        ),
        ('[run]\nrounds = 20000\n[algorithm]\nname = "quadratic"', "run.rounds = 20000: must be <= 10000", None),
        ('[limits]\nweight = 0.5\n[algorithm]\nname = "sparseloco"', "limits.weight = 0.5: must be >= 1", None),
        ("[model]\nwidth = 100\nheads = 3", "model.width = 100: must be a multiple of model.heads = 3", None),
        ("[model]\nwidth = 12\nheads = 4", "model.heads = 4: gives heads of 3 features, which must be even", None),
        ('[run]\nname = "\\u001b[31m"', 'run.name = "?[31m": must be printable, on one line', None),
        ('[membership]\npolicy = "allow"', "membership.allow is empty", None),
        ('[membership]\nallow = ["a"]', "membership.allow lists peers, but the policy is", None),
        ('[membership]\npolicy = "allow"\nallow = ["a"]', 'membership.allow: "a" is not a peer id', None),
        ("[run", "the manifest is not TOML", None),
        ("a = " + "9" * 5000, "the manifest is not TOML", None),
        ("a = " + "[" * 50_000, "the manifest is nested too deeply", None),
        ("#" * (MAX_MANIFEST + 1), "the manifest is longer than 64 KiB", None),
    ],
)
def test_errors_name_the_place_and_what_is_allowed(text, message, hint):
    with pytest.raises(ManifestError) as caught:
        parse_settings(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    if hint is not None:
        assert caught.value.hint.startswith(hint)


def test_what_cannot_be_written_cannot_be_created():
    peers = tuple(str(PeerId(bytes([i % 256, i // 256]) + bytes(30))) for i in range(2000))
    with pytest.raises(ManifestError, match="longer than 64 KiB"):
        Manifest.create(Settings(membership=MembershipSettings(policy="allow", allow=peers)), FOUNDER)


def test_unsigned_manifests_are_for_founding_only():
    text = dump_settings(Settings())
    with pytest.raises(ManifestError, match="not signed"):
        Manifest.parse(text)
    assert Manifest.found(text, FOUNDER) == Manifest.create(Settings(), FOUNDER)


def test_only_the_founder_founds_a_signed_manifest():
    manifest = Manifest.create(Settings(), FOUNDER)
    assert Manifest.found(manifest.dump(), FOUNDER) == manifest
    with pytest.raises(ManifestError, match="signed by another peer"):
        Manifest.found(manifest.dump(), OTHER)


def test_a_signature_of_somebody_else_is_refused():
    forged = attrs.evolve(Manifest.create(Settings(), FOUNDER), founder=OTHER.public_key)
    with pytest.raises(ManifestError, match="signature does not match"):
        Manifest.parse(forged.dump())
    with pytest.raises(ManifestError, match="signature does not match"):
        parse_settings(forged.dump())


@pytest.mark.parametrize("value", ['""', "3", '"abc"', '"' + "a" * 53 + '"'])
def test_a_damaged_founder_key_is_named(value):
    text = dump_settings(Settings()) + f'[founder]\npublic_key = {value}\nsignature = ""\n'
    with pytest.raises(ManifestError, match=r"founder\.public_key must be 32 bytes in base32"):
        Manifest.parse(text)


def test_every_key_is_explained():
    methods = [Settings(algorithm=AlgorithmSettings(name)) for name in METHODS]
    tables = [table for settings in methods for table in tomllib.loads(dump_settings(settings)).items()]
    assert set(NOTES) == {f"{table}.{key}" for table, keys in tables for key in keys}


def test_warnings():
    fitting = Settings(run=RunSettings(rounds=50))
    assert warnings(fitting) == ()
    assert warnings(Settings()) == ()
    (short,) = warnings(attrs.evolve(fitting, run=RunSettings(rounds=49)))
    assert "outer_momentum" in short
    assert warnings(Settings(run=RunSettings(rounds=10), algorithm=AlgorithmSettings(outer_momentum=0.5))) == ()
    (cold,) = warnings(Settings(run=RunSettings(rounds=50), inner=InnerSettings(warmup=2500)))
    assert "warmup" in cold
    (crowded,) = warnings(Settings(limits=LimitSettings(peers=300)))
    assert "shards" in crowded


def test_a_method_named_by_an_endless_number_is_refused():
    with pytest.raises(ManifestError, match=r"algorithm\.name"):
        parse_settings(f"[algorithm]\nname = 0x{'f' * 5000}\n")
