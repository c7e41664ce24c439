"""A change of the files that a configuration comes from is seen once they are left alone."""

import pytest

from anvil_mux.serve.files import WatchedFiles


def test_a_file_that_is_new_among_those_watched_is_no_news_until_it_changes(tmp_path):
    file, keys = tmp_path / "compose.yaml", tmp_path / "keys"
    keys.write_text("1")
    files = [str(file)]
    watch = WatchedFiles(lambda: files, pytest.fail)
    files.append(str(keys))
    assert [watch.has_news() for _ in range(3)] == [False] * 3
    keys.write_text("12")
    assert [watch.has_news() for _ in range(3)] == [False, True, False]


def test_a_file_is_news_once_it_has_been_left_alone(tmp_path):
    file, other = tmp_path / "compose.yaml", tmp_path / ".env"
    file.write_text("1")
    watch = WatchedFiles(lambda: [str(file), str(other)], pytest.fail)
    assert not watch.has_news()
    file.write_text("12")
    assert not watch.has_news()
    file.write_text("123")
    assert not watch.has_news()
    assert watch.has_news()
    assert not watch.has_news()
    other.write_text("")
    assert [watch.has_news() for _ in range(3)] == [False, True, False]
    other.unlink()
    other.write_text("")
    file.unlink()
    assert [watch.has_news() for _ in range(3)] == [False, True, False]


def test_files_that_are_never_left_alone_are_news_all_the_same(tmp_path):
    file = tmp_path / "compose.yaml"
    file.write_text("")
    watch = WatchedFiles(lambda: [str(file)], pytest.fail)
    news = []
    for _ in range(10):
        file.write_text(file.read_text() + "1")
        news.append(watch.has_news())
    assert news == [False, False, False, False, True] * 2
