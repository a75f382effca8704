import hashlib
import os

import numpy as np
import pytest

from peer.data import Corpus, Dataset
from peer.settings import DataSettings
from protocol.errors import DataError
from protocol.identity import PeerId

CONTEXT = 8


def peers(count):
    return [PeerId(hashlib.sha256(bytes([index])).digest()) for index in range(count)]


def babble(count):
    """Text in which no six bytes occur twice, but by a chance of one in a thousand that the seed does not meet."""
    return np.random.default_rng(0).integers(32, 127, count, dtype=np.uint8).tobytes()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(babble(60_000))
    return path


def dataset(source, *, shards=16, validation=0.1, seed=0, context=CONTEXT):
    return Dataset(Corpus.open(source), DataSettings(shards=shards, validation=validation), seed=seed, context=context)


def bytes_of(windows):
    return {bytes(window.tolist()) for window in windows}


def sixes(windows):
    """All strings of six bytes in some windows."""
    return {bytes(w[i : i + 6]) for w in (window.tolist() for window in windows) for i in range(len(w) - 5)}


def drawn(data, peer, members, revision=1, count=40, batch=16):
    stream = data.training_batches(peer, members, revision, batch)
    return [window for _ in range(count) for window in next(stream)]


class TestCorpus:
    def test_a_file_is_read_whole(self, text):
        corpus = Corpus.open(text)
        assert corpus.text.tobytes() == text.read_bytes()
        assert (corpus.names, corpus.ends, corpus.skipped) == (("",), (60_000,), 0)

    def test_a_folder_is_read_in_order_without_what_is_not_text(self, tmp_path):
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "two.txt").write_text("two")
        (tmp_path / "a.py").write_text("one")
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        (tmp_path / ".hidden").write_text("hidden")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "config").write_text("hidden")
        os.mkfifo(tmp_path / "pipe")
        corpus = Corpus.open(str(tmp_path))
        assert corpus.text.tobytes() == b"onetwo"
        assert corpus.names == ("a.py", "b/two.txt")
        assert corpus.ends == (3, 6)
        assert corpus.skipped == 3

    def test_the_standard_library_is_text_enough(self):
        corpus = Corpus.open("stdlib")
        assert len(corpus.text) > 5_000_000
        assert "argparse.py" in corpus.names
        assert not any("site-packages" in name or name.startswith("test/") for name in corpus.names)

    def test_a_missing_source_is_an_error(self, tmp_path):
        with pytest.raises(DataError, match="no file or folder"):
            Corpus.open(tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("content", "file", "folder"),
        [(b"", "it is empty", "it is empty"), (b"\0binary", "it is binary", "unreadable: 1")],
    )
    def test_a_source_without_text_is_an_error(self, tmp_path, content, file, folder):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=f"no readable text: .*{folder}"):
            Corpus.open(tmp_path)
        with pytest.raises(DataError, match=f"no readable text: {file}"):
            Corpus.open(tmp_path / "file")

    def test_a_device_is_not_taken_for_a_binary_file(self):
        with pytest.raises(DataError, match="/dev/null holds no readable text: it is not a regular file"):
            Corpus.open("/dev/null")


class TestSplit:
    def test_held_out_text_is_never_trained_on(self, text):
        data = dataset(text)
        held_out = sixes(data.validation_windows(10_000))
        (peer,) = peers(1)
        trained = sixes(drawn(data, peer, [], count=400))
        assert len(held_out) == 6000 // (CONTEXT + 1) * (CONTEXT - 4)
        assert len(trained) > 20_000
        assert not held_out & trained

    def test_whole_files_are_held_out_where_files_are_small(self, tmp_path):
        for index in range(200):
            (tmp_path / f"{index:03}.txt").write_bytes(bytes([32 + index % 90]) * 40 + b"%03d" % index * 20)
        windows = dataset(tmp_path, shards=4).validation_windows(1000)
        # Ten of every hundred bytes, and from files all over the folder.
        assert sum(len(window) for window in windows) == pytest.approx(2000, rel=0.1)
        assert len({window[0].item() for window in windows}) > 10

    def test_the_seed_decides_what_is_held_out(self, text):
        one, again, other = dataset(text), dataset(text), dataset(text, seed=1)
        assert bytes_of(one.validation_windows(50)) == bytes_of(again.validation_windows(50))
        assert bytes_of(one.validation_windows(50)) != bytes_of(other.validation_windows(50))

    def test_the_name_of_a_single_file_does_not_matter(self, text, tmp_path):
        (tmp_path / "other.txt").write_bytes(text.read_bytes())
        one, other = dataset(text), dataset(tmp_path / "other.txt")
        assert bytes_of(one.validation_windows(50)) == bytes_of(other.validation_windows(50))

    def test_validation_windows_do_not_overlap_and_are_as_many_as_fit(self, text):
        data = dataset(text)
        windows = data.validation_windows(10_000)
        assert windows.shape == (6000 // (CONTEXT + 1), CONTEXT + 1)
        assert len(sixes(windows)) == windows.shape[0] * (CONTEXT - 4)
        assert data.validation_windows(7).shape == (7, CONTEXT + 1)

    def test_too_little_text_says_how_much_is_needed(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes(b"x" * 100)
        with pytest.raises(DataError, match="need 154 bytes, but there are 100") as caught:
            dataset(path)
        assert "shards" in caught.value.hint

    def test_just_enough_text_is_enough(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes(babble(9 + 16 * 9))
        data = dataset(path, validation=0.01)
        assert data.validation_windows(64).shape == (1, 9)
        assert len(bytes_of(drawn(data, peers(1)[0], []))) == 16


class TestShards:
    def test_every_shard_belongs_to_exactly_one_member(self, text):
        data, members = dataset(text, shards=64), peers(4)
        owned = [data.owned(peer, members) for peer in members]
        assert sorted(shard for shards in owned for shard in shards) == list(range(64))
        assert all(len(shards) > 4 for shards in owned)

    def test_a_peer_counts_itself_in_and_order_does_not_matter(self, text):
        data, members = dataset(text), peers(4)
        assert data.owned(members[0], members[1:]) == data.owned(members[0], members[::-1])

    def test_a_leaver_moves_only_its_own_shards(self, text):
        data, members = dataset(text, shards=64), peers(4)
        for peer in members[:3]:
            assert set(data.owned(peer, members)) <= set(data.owned(peer, members[:3]))

    def test_members_train_on_different_text(self, text):
        data, members = dataset(text), peers(3)
        trained = [bytes_of(drawn(data, peer, members, count=200)) for peer in members]
        assert all(len(windows) > 500 for windows in trained)
        assert not trained[0] & trained[1]
        assert not trained[1] & trained[2]
        assert not trained[0] & trained[2]

    def test_a_peer_without_a_shard_works_on_all(self, text):
        data, members = dataset(text, shards=1), peers(3)
        assert [data.owned(peer, members) for peer in members] == [(0,)] * 3

    def test_windows_are_reproducible_and_fresh_in_every_round(self, text):
        data, members = dataset(text), peers(2)
        once = drawn(data, members[0], members, revision=3, count=2)
        again = drawn(data, members[0], members, revision=3, count=2)
        later = drawn(data, members[0], members, revision=4, count=2)
        assert [w.tolist() for w in once] == [w.tolist() for w in again]
        assert [w.tolist() for w in once] != [w.tolist() for w in later]

    def test_peers_draw_different_windows_even_from_the_same_shards(self, text):
        data, members = dataset(text, shards=1), peers(2)
        one, other = (drawn(data, peer, members, count=2) for peer in members)
        assert [w.tolist() for w in one] != [w.tolist() for w in other]

    def test_batches_have_one_byte_more_than_the_context(self, text):
        data = dataset(text)
        batch = next(data.training_batches(peers(1)[0], [], 1, 5))
        assert batch.shape == (5, CONTEXT + 1)
        assert str(batch.dtype) == "torch.int64"
