"""The rules of layers one by one, each as an image that shows it (bottom layer first)."""

from __future__ import annotations

import stat

import pytest

from runner.errors import RunnerError
from runner.images.flatten.flatten import Flattener
from runner.images.layers.tar import Entry
from runner.images.squashfs.data import Directory, Leaf
from tests.images.handmade import layer
from tests.images.layer_builder import flattened, listing, shown

REGULAR = stat.S_IFREG | 0o644


def test_an_upper_layer_wins() -> None:
    assert shown([[("f", "a", "old"), ("f", "b", "kept")], [("f", "a", "new")]]) == {"a": "new", "b": "kept"}


def test_a_whiteout_deletes_from_lower_layers_wherever_it_stands() -> None:
    below = [("d", "a"), ("f", "a/x", "1"), ("f", "a/y", "2")]
    assert shown([below, [("w", "a/x")]]) == {"a": "/", "a/y": "2"}
    assert shown([below, [("f", "a/x", "new"), ("w", "a/x")]]) == {"a": "/", "a/x": "new", "a/y": "2"}
    assert shown([below, [("w", "a/x"), ("f", "a/x", "new")]]) == {"a": "/", "a/x": "new", "a/y": "2"}


def test_a_whiteout_of_a_directory_takes_all_of_it_and_its_attributes() -> None:
    below = [("d", "a", "", 0o700), ("f", "a/x", "1"), ("f", "a/b/y", "2")]
    assert shown([below, [("w", "a")]]) == {}
    found = listing(flattened([layer(below), layer([("w", "a"), ("f", "a/z", "3")])]))
    assert found["a"][1:3] == (0o755, 0) and "a/x" not in found and "a/z" in found


def test_a_whiteout_reaches_down_all_layers_and_only_down() -> None:
    assert shown([[("f", "a", "1")], [("f", "a", "2")], [("w", "a")]]) == {}
    assert shown([[("f", "a", "1")], [("w", "a")], [("f", "a", "3")]]) == {"a": "3"}


def test_an_opaque_marker_hides_lower_children_and_not_its_siblings() -> None:
    below = [("d", "a", "", 0o700), ("f", "a/x", "1"), ("f", "a/b/y", "2")]
    for upper in ([("o", "a"), ("f", "a/new", "3")], [("f", "a/new", "3"), ("o", "a")]):
        found = listing(flattened([layer(below), layer(upper)]))
        assert set(found) == {"", "a", "a/new"}
        assert found["a"][1] == 0o700, "the directory itself stays as it was"


def test_an_opaque_root_hides_everything_below() -> None:
    assert shown([[("f", "a", "1")], [("o", ""), ("f", "b", "2")]]) == {"b": "2"}


def test_a_whiteout_within_an_opaque_directory_is_no_harm() -> None:
    assert shown([[("f", "a/x", "1")], [("d", "a"), ("o", "a"), ("w", "a/x"), ("f", "a/y", "2")]]) == {
        "a": "/",
        "a/y": "2",
    }


def test_markers_never_show_and_make_no_directories() -> None:
    assert shown([[("f", "x", "1")], [("w", "a/b/c"), ("o", "d")]]) == {"x": "1"}


def test_a_whiteout_below_what_is_deleted_or_no_directory() -> None:
    """The two orders of containers/storage's ENOTDIR case."""
    for upper in ([("w", "foo"), ("w", "foo/bar")], [("w", "foo/bar"), ("w", "foo")]):
        assert shown([[("f", "foo", "1")], upper]) == {}
    assert shown([[("f", "foo", "1")], [("w", "foo/bar")]]) == {"foo": "1"}


@pytest.mark.parametrize("name", [".wh.", "a/.wh.", ".wh..", ".wh..."])
def test_a_whiteout_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(RunnerError, match="a layer of the image is invalid"):
        flattened([layer([("f", name, "")])])


def test_types_change() -> None:
    folder = [("d", "a"), ("f", "a/x", "1")]
    assert shown([folder, [("f", "a", "file")]]) == {"a": "file"}
    assert shown([folder, [("l", "a", "b")]]) == {"a": "-> b"}
    assert shown([[("f", "a", "file")], folder]) == {"a": "/", "a/x": "1"}
    assert shown([folder, [("f", "a", "file")], [("d", "a")]]) == {"a": "/"}
    assert shown([folder, [("f", "a", "file")], [("f", "a/y", "2")]]) == {"a": "/", "a/y": "2"}


def test_directory_over_directory_takes_the_upper_attributes_and_merges() -> None:
    found = listing(flattened([layer([("d", "a", "", 0o700), ("f", "a/x", "1")]), layer([("d", "a", "", 0o711)])]))
    assert found["a"][1:3] == (0o711, 0o711) and "a/x" in found


def test_a_missing_parent_is_root_s_0755_of_time_0_until_a_layer_names_it() -> None:
    root = flattened([layer([("f", "a/b", "1")])])
    folder = root.children[b"a"]
    assert isinstance(folder, Directory)
    assert (folder.mode, folder.uid, folder.gid, folder.mtime) == (stat.S_IFDIR | 0o755, 0, 0, 0)
    found = listing(flattened([layer([("d", "a", "", 0o700)]), layer([("f", "a/b", "1")])]))
    assert found["a"][1] == 0o700


def test_the_root_s_own_entry_gives_its_attributes_and_the_root_stays_a_directory() -> None:
    assert listing(flattened([layer([("d", "./", "", 0o711)]), layer([("f", "a", "")])]))[""][1] == 0o711
    for kind in "flh":
        with pytest.raises(RunnerError, match="a layer of the image is invalid"):
            flattened([layer([("f", "a", ""), (kind, ".", "a")])])


def test_the_later_entry_of_a_path_in_one_layer_counts() -> None:
    assert shown([[("f", "a", "1"), ("f", "a", "2")]]) == {"a": "2"}
    assert shown([[("d", "a"), ("f", "a/x", "1"), ("f", "a", "2")]]) == {"a": "2"}
    assert shown([[("f", "a/low", "0")], [("f", "a", "1"), ("d", "a"), ("f", "a/x", "2")]]) == {
        "a": "/",
        "a/low": "0",
        "a/x": "2",
    }


def group(found: dict[str, tuple], path: str) -> str:
    return found[path][4]


def test_hard_links_within_a_layer_in_either_order() -> None:
    for operations in ([("f", "a", "1"), ("h", "b", "a")], [("h", "b", "a"), ("f", "a", "1")]):
        found = listing(flattened([layer(operations)]))
        assert group(found, "a") == group(found, "b") == "a" and found["b"][3] == "1"


def test_a_hard_link_to_a_lower_layer_shares_its_file() -> None:
    found = listing(flattened([layer([("f", "a", "1", 0o600)]), layer([("h", "b", "a")])]))
    assert group(found, "b") == "a" and found["b"][:4] == ("f", 0o600, 0o600, "1")


def test_a_hard_link_outlives_the_name_it_was_made_from() -> None:
    assert shown([[("f", "a", "1"), ("h", "b", "a")], [("w", "a")]]) == {"b": "1"}
    assert shown([[("f", "a", "1"), ("h", "b", "a")], [("f", "a", "2")]]) == {"a": "2", "b": "1"}
    assert shown([[("f", "a", "1")], [("h", "b", "a")], [("w", "a")]]) == {"b": "1"}
    assert shown([[("f", "a", "1")], [("h", "b", "a"), ("w", "a")]]) == {"b": "1"}


def test_a_hard_link_does_not_find_what_a_layer_between_took() -> None:
    for between in ([("w", "d/a")], [("w", "d")], [("o", "d")], [("f", "d", "")], [("d", "d/a")], [("f", "d/a/x", "")]):
        with pytest.raises(RunnerError, match="a layer of the image is invalid"):
            flattened([layer([("f", "d/a", "1")]), layer(between), layer([("h", "b", "d/a")])])


def test_a_hard_link_finds_what_a_layer_between_put_there() -> None:
    assert shown([[("f", "a", "1")], [("w", "a"), ("f", "a", "2")], [("h", "b", "a")]]) == {"a": "2", "b": "2"}


def test_chains_of_hard_links() -> None:
    chain = [("h", "d", "c"), ("h", "c", "b"), ("h", "b", "a"), ("f", "a", "1")]
    for layers in ([chain], [chain[::-1]], [[one] for one in chain[::-1]]):
        found = listing(flattened([layer(operations) for operations in layers]))
        assert {group(found, path) for path in "abcd"} == {"a"}
    assert shown([[("f", "a", "1")], [("h", "b", "a")], [("w", "a")], [("h", "c", "b")], [("w", "b")]]) == {"c": "1"}


def test_a_hidden_link_s_target_serves_a_link_that_shows() -> None:
    lower = [("f", "a", "1"), ("h", "b", "a"), ("h", "c", "b")]
    assert shown([lower, [("f", "a", "2"), ("f", "b", "3")]]) == {"a": "2", "b": "3", "c": "1"}


def test_a_hidden_link_to_nothing_is_no_harm() -> None:
    assert shown([[("h", "b", "gone")], [("f", "b", "1")]]) == {"b": "1"}


def test_hard_links_to_symlinks_and_to_directories() -> None:
    found = listing(flattened([layer([("l", "a", "x"), ("h", "b", "a")])]))
    assert found["b"][:1] == ("l",) and group(found, "b") == "a"
    for layers in ([[("d", "a"), ("h", "b", "a")]], [[("d", "a")], [("h", "b", "a")]], [[("h", "b", ".")]]):
        with pytest.raises(RunnerError, match="a layer of the image is invalid"):
            flattened([layer(operations) for operations in layers])


@pytest.mark.parametrize("layers", [[[("h", "b", "a")]], [[("h", "b", "a"), ("h", "a", "b")]], [[("h", "a", "a")]]])
def test_a_hard_link_to_nothing_is_refused(layers) -> None:
    with pytest.raises(RunnerError, match="a layer of the image is invalid"):
        flattened([layer(operations) for operations in layers])


def test_aufs_names_do_not_show_and_its_hard_links_work() -> None:
    aufs = [
        ("d", ".wh..wh.plnk"),
        ("f", ".wh..wh.plnk/15", "1"),
        ("f", ".wh..wh.aufs", ""),
        ("h", "a", ".wh..wh.plnk/15"),
    ]
    assert shown([aufs]) == {"a": "1"}


def test_below_a_symlink_of_a_lower_layer_the_path_s_own_directory_wins() -> None:
    lower = [("d", "usr/lib"), ("f", "usr/lib/x", "1"), ("l", "lib", "usr/lib")]
    assert shown([lower, [("f", "lib/y", "2")]]) == {
        "lib": "/",
        "lib/y": "2",
        "usr": "/",
        "usr/lib": "/",
        "usr/lib/x": "1",
    }


def test_a_symlink_of_the_same_layer_is_followed_within_the_root() -> None:
    for target in ("usr/lib", "/usr/lib", "../../usr/./lib", "usr/x/../lib"):
        found = shown([[("f", "usr/lib/x", "1"), ("f", "usr/x/z", "")], [("l", "lib", target), ("f", "lib/y", "2")]])
        assert found["usr/lib/y"] == "2" and found["lib"] == f"-> {target}" and found["usr/lib/x"] == "1"
    found = shown([[("l", "lib", "usr/lib"), ("f", "usr/lib/x", "1"), ("h", "y", "lib/x"), ("h", "lib/z", "y")]])
    assert found["y"] == found["usr/lib/z"] == "1"
    assert shown([[("f", "usr/lib/x", "1")], [("l", "lib", "usr/lib"), ("w", "lib/x")]]) == {
        "lib": "-> usr/lib",
        "usr": "/",
        "usr/lib": "/",
    }


def test_symlinks_that_lead_round_are_refused() -> None:
    with pytest.raises(RunnerError, match="a layer of the image is invalid"):
        flattened([layer([("l", "a", "b"), ("l", "b", "a"), ("f", "a/x", "")])])


def test_a_symlink_parent_never_leads_out() -> None:
    found = shown([[("l", "out", "../../../../etc"), ("f", "out/passwd", "mine")]])
    assert found == {"out": "-> ../../../../etc", "etc": "/", "etc/passwd": "mine"}


def taken(entry: Entry, **options: object) -> Leaf | Directory:
    flattener = Flattener(**options)  # type: ignore[arg-type]
    flattener.begin_layer()
    flattener.offer(entry)
    flattener.end_layer()
    return flattener.finish().children.get(entry.path)  # type: ignore[return-value]


def test_owners_are_root_or_kept_and_never_more_than_squashfs_holds() -> None:
    entry = Entry(b"a", REGULAR | stat.S_ISUID, 3000000, 7, 0, 0)
    leaf = taken(entry)
    assert (leaf.uid, leaf.gid, leaf.mode) == (0, 0, REGULAR | stat.S_ISUID)
    kept = taken(entry, owners="keep")
    assert (kept.uid, kept.gid) == (3000000, 7)
    for uid in (-2, 1 << 32):
        with pytest.raises(RunnerError, match="a layer of the image is invalid"):
            taken(Entry(b"a", REGULAR, uid, 0, 0, 0), owners="keep")


def test_of_xattrs_only_those_that_mean_something_elsewhere_are_kept() -> None:
    names = (b"security.capability", b"security.selinux", b"system.posix_acl_access", b"trusted.x", b"user.x")
    entry = Entry(b"a", REGULAR, 0, 0, 0, 0, xattrs=tuple((name, b"\0\xff") for name in names))
    assert taken(entry).xattrs == ((b"security.capability", b"\0\xff"), (b"user.x", b"\0\xff"))
    assert taken(entry, xattrs="drop").xattrs == ()


def test_devices_have_linux_s_number() -> None:
    entry = Entry(b"a", stat.S_IFBLK | 0o600, 0, 0, 0, 0, device=(259, 70000))
    assert taken(entry).data == (70000 & 0xFF) | 259 << 8 | (70000 & ~0xFF) << 12


def test_times_that_squashfs_cannot_hold_are_clamped() -> None:
    assert [taken(Entry(b"a", REGULAR, 0, 0, time, 0)).mtime for time in (-5, 1 << 40, 7)] == [0, (1 << 32) - 1, 7]


@pytest.mark.parametrize(("uid", "gid"), [(-1, 0), (0, 1 << 32)])
def test_owners_that_squashfs_cannot_hold_are_refused_if_owners_are_kept(uid: int, gid: int) -> None:
    entry = Entry(b"a", REGULAR, uid, gid, 0, 0)
    with pytest.raises(RunnerError, match="is invalid") as refused:
        taken(entry, owners="keep")
    assert f"owner {uid}:{gid}" in refused.value.why
    assert (taken(entry).uid, taken(entry).gid) == (0, 0)


def test_contents_are_asked_for_once_and_hidden_ones_not_at_all() -> None:
    flattener = Flattener()
    file = Entry(b"a", REGULAR, 0, 0, 0, 5)
    flattener.begin_layer()
    assert flattener.offer(file) is not None
    assert flattener.end_layer() is False
    flattener.begin_layer()
    assert flattener.offer(file) is None
    assert flattener.end_layer() is False


def test_a_layer_is_read_again_only_for_a_link_to_a_content_that_went_by() -> None:
    file, link = Entry(b"a", REGULAR, 0, 0, 0, 5), Entry(b"b", 0, 0, 0, 0, 0, target=b"a", hard_link=True)
    flattener = Flattener()
    flattener.begin_layer()
    flattener.offer(file)
    flattener.end_layer()
    flattener.begin_layer()
    assert [flattener.offer(file), flattener.offer(link)] == [None, None]
    assert flattener.end_layer() is True
    leaf = flattener.again(file)
    assert leaf is not None and flattener.again(link) is None
    assert flattener.finish().children[b"b"] is leaf


def test_10000_layers_and_deep_paths() -> None:
    found = shown([[("f", "a", str(number)), ("f", f"f{number % 7}", "")] for number in range(10_000)])
    assert found["a"] == "9999" and len(found) == 8
    deep = "/".join("d" * 2000)
    assert deep + "/x" in shown([[("f", deep + "/x", "1")], [("w", deep + "/y")]])


def test_an_image_that_keeps_us_busy_is_refused(monkeypatch) -> None:
    """Again and again, a file takes the place of a directory with many names of an upper layer."""
    monkeypatch.setattr("runner.images.flatten.view._WORK", 100_000)
    flattener = Flattener()
    flattener.begin_layer()
    for number in range(1_000):
        flattener.offer(Entry(b"a/%d" % number, REGULAR, 0, 0, 0, 0))
    flattener.end_layer()
    flattener.begin_layer()
    with pytest.raises(RunnerError, match="cannot import the image"):
        for _ in range(200):
            flattener.offer(Entry(b"a", REGULAR, 0, 0, 0, 0))
            flattener.offer(Entry(b"a/x", REGULAR, 0, 0, 0, 0))


def test_many_hard_links_below_a_symlink_that_a_layer_above_replaces_are_no_attack(monkeypatch) -> None:
    """As in an environment of conda: each link of a deep folder looks for the hidden symlink on its way."""
    monkeypatch.setattr("runner.images.flatten.view._WORK", 1_000)
    folder = "a/b/c/d/e/f/g/h/i/j"
    lower = [
        ("l", "link", "a"),
        ("f", f"{folder}/x", "1"),
        *(("h", f"{folder}/{n}", f"{folder}/x") for n in range(200)),
    ]
    found = shown([lower, [("f", "link", "2")]])
    assert found["link"] == "2" and found[f"{folder}/199"] == "1"


def test_very_deep_hard_links_below_such_a_symlink_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("runner.images.flatten.view._WORK", 1_000)
    folder = "/".join("d" * 500)
    with pytest.raises(RunnerError, match="cannot import the image"):
        shown([[("l", "link", "a"), ("f", f"{folder}/x", "1"), ("h", "y", f"{folder}/x")], [("f", "link", "2")]])
