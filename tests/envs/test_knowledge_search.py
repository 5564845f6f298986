"""Knowledge search: a transcript, questions whose answers stand where they should, and the real encyclopedia."""

from __future__ import annotations

import gzip
import re
import shutil
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from envs.check import Subject, examine
from envs.data import corpus
from envs.data.dictionaries import entries
from envs.data.facts import QUESTIONS
from envs.data.knowledge import Encyclopedia, fill
from envs.data.packages import depends, run
from envs.episodes import at_random, expert, play
from envs.knowledge_search import KnowledgeSearch
from envs.protocol import Step
from envs.tools import read_calls, write_call
from rl.errors import ConfigError
from rl.stream import derive_seed
from rl.trajectory import Problem

Excerpt = partial(KnowledgeSearch, corpus="excerpt")


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "test", 0, derive_seed("test", seed), split)


async def call(environment: KnowledgeSearch, tool: str, /, **arguments: object) -> Step:
    return await environment.step(write_call(tool, **arguments))


async def test_transcript() -> None:
    environment = Excerpt(hops_min=2, results=2, page_chars=300)
    episode = await play(environment, problem(4), expert, 10)
    await environment.close()
    assert "\n".join(f"{m.role}: {m.content}" for m in episode.messages[1:]) == TRANSCRIPT
    assert episode.steps[-1].info == INFO


async def test_it_keeps_the_promises_of_an_environment() -> None:
    found = await examine(Subject(Excerpt, problems=15))
    assert [finding for finding in found if not finding.ok] == []


async def test_experts_read_the_answer_before_they_give_it_and_find_what_they_read() -> None:
    found = reads = 0
    for seed in range(40):
        environment = Excerpt()
        episode = await play(environment, problem(seed, "heldout" if seed % 4 == 0 else "train"), expert, 10)
        assert episode.reward == 1.0
        assert episode.messages[-2].content in episode.messages[-3].content
        for before, turn in zip(episode.messages[1:], episode.messages[2:], strict=False):
            for made in read_calls(turn.content) if turn.role == "assistant" else ():
                if made.name == "read":
                    reads += 1
                    found += f"{made.arguments['document']}. " in before.content
        await environment.close()
    assert reads >= 40 and found >= 0.9 * reads


async def test_random_agents_score_nothing() -> None:
    for seed in range(20):
        environment = Excerpt()
        assert (await play(environment, problem(seed), at_random(seed), 10)).reward == 0.0
        await environment.close()


async def test_a_fact_is_asked_in_one_split_only_and_two_hops_do_not_name_their_subject() -> None:
    asked: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split, seen in asked.items():
        for seed in range(100):
            environment = Excerpt(hops_min=2)
            text = (await environment.reset(problem(seed, split)))[-1].content
            assert "the country whose" in text and environment._fact.subject not in text
            seen.add(str(environment.fingerprint()))
            await environment.close()
    assert len(asked["train"]) > 30 and len(asked["heldout"]) > 8
    assert not asked["train"] & asked["heldout"]


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("search", {"query": "what is the"}, "some words"),
        ("search", {"query": "xyzzyx"}, "nothing found"),
        ("search", {"query": '" AND NEAR( title:'}, ". "),
        ("read", {"document": 0}, "no document 0"),
        ("read", {"document": 10**30}, "no document 1000"),
        ("read", {"document": 1, "page": 99}, "has pages 1 to"),
        ("read", {"document": 1, "page": 0}, "has pages 1 to"),
    ],
)
async def test_whatever_is_asked_is_answered(tool: str, arguments: dict[str, object], words: str) -> None:
    environment = Excerpt()
    await environment.reset(problem(0))
    step = await call(environment, tool, **arguments)
    assert words in step.observation.content and not step.terminated
    await environment.close()


async def test_pages_make_up_the_document_and_results_are_as_many_as_wished() -> None:
    environment = Excerpt(page_chars=200, results=3)
    await environment.reset(problem(0))
    pages: list[str] = []
    while (step := await call(environment, "read", document=3, page=len(pages) + 1)).error is None:
        pages.append(step.observation.content.partition("\n")[2])
    db = environment._db
    assert db is not None and len(pages) > 3
    assert "".join(pages) == await environment.in_thread(
        lambda: db.execute("SELECT text FROM documents WHERE rowid = 3").fetchone()[0]
    )
    found = (await call(environment, "search", query="capital government country")).observation.content
    assert len(found.splitlines()) == 3
    await environment.close()


def test_facts_stand_in_a_form_that_has_one_answer() -> None:
    made = Encyclopedia()
    made.add_country(
        {
            "Government": {
                "Country name": {"conventional short form": {"text": "Erewhon"}},
                "Capital": {"name": {"text": "Nowhere"}},
                "Independence": {"text": "4 May 1872 (from England)"},
            },
            "Geography": {
                "Coastline": {"text": "0 km (landlocked)"},
                "Elevation extremes": {"highest point": {"text": "unnamed peak 1,234 m"}},
                "Area": {"total": {"text": "NA"}},
            },
        }
    )
    made.add_manual_page(
        "library/one",
        ".. module:: one\n\nHead\n====\n\n.. function:: old(x)\n\n   Does.\n\n   .. versionadded:: 3.8\n\n"
        ".. function:: changed(x)\n\n   .. versionadded:: 3.9\n      The parameter x.\n\n"
        "Second\n------\n\n.. function:: tenth()\n\n   .. versionadded:: 3.10\n",
    )
    assert made.documents[0] == (
        "factbook",
        "Erewhon: Government",
        "Country name, conventional short form: Erewhon\nCapital, name: Nowhere\n"
        "Independence: 4 May 1872 (from England)",
    )
    assert [title for _, title, _ in made.documents[2:]] == [
        "library/one: .. module:: one",
        "library/one: Head",
        "library/one: Second",
    ]
    assert [tuple(fact)[:4] for fact in made.records()["facts"]] == [
        ("capital", "Erewhon", "Nowhere", 1),
        ("height", "Erewhon", "1,234", 2),
        ("year", "Erewhon", "1872", 1),
        ("version", "one.old()", "3.8", 4),
    ]


def test_a_dictionary_gives_each_entry_once(tmp_path: Path) -> None:
    content = "about me" + "One, first." + "second, é"
    (tmp_path / "small.dict.dz").write_bytes(gzip.compress(content.encode()))
    rows = ("00-database-info\tA\tI", "a name of one\tI\tL", "one\tI\tL", "two\tT\tK")
    (tmp_path / "small.index").write_text("\n".join(rows) + "\n")
    assert list(entries(tmp_path, "small")) == [("one", "One, first."), ("two", "second, é")]


def build(collect: Any) -> dict[str, Any]:
    return corpus.build("knowledge_search", 1, collect, fill)


def test_a_corpus_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "HOME", tmp_path)
    prepare = partial(KnowledgeSearch.prepare, {})
    with pytest.raises(ConfigError, match=r"not on this machine.*run `rollmill env prepare knowledge_search`"):
        prepare()
    (tmp_path / "knowledge_search.draft").mkdir()
    (tmp_path / "knowledge_search.draft" / "left-by-a-killed-build").touch()
    with pytest.raises(ConfigError, match="`dpkg-deb --no-such` failed: "):
        build(lambda draft: run(draft, "dpkg-deb", "--no-such"))
    assert [file.name for file in tmp_path.iterdir()] == ["knowledge_search.lock"]
    monkeypatch.setattr(corpus, "BUILD_S", 0.05)
    with FileLock(tmp_path / "knowledge_search.lock"), pytest.raises(ConfigError, match="another process has been"):
        build(lambda draft: pytest.fail("two at once"))
    records = {"documents": [("s", "title", "text")], "facts": []}
    manifest = build(lambda draft: (records, {"package": "1"}))
    assert manifest["sources"] == {"package": "1"}
    prepare()
    assert build(lambda draft: pytest.fail("built again")) == manifest
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        corpus.connect("knowledge_search", "full", fill).execute("DELETE FROM facts")
    file = tmp_path / "knowledge_search.sqlite"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="is damaged"):
        prepare()
    assert build(lambda draft: (records, {"package": "1"})) == manifest
    with pytest.raises(ConfigError, match="is of recipe 1, not 2"):
        corpus.find("knowledge_search", 2)
    assert {entry.name for entry in tmp_path.iterdir()} == {
        f"knowledge_search.{end}" for end in ("lock", "json", "sqlite")
    }


@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="Debian's package client")
def test_empty_package_lists_are_no_empty_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apt.conf").write_text(f'Dir::State::lists "{tmp_path}";\nDir::Cache "{tmp_path}";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    with pytest.raises(ConfigError, match=r"do not have python3-doc; run `apt-get update`"):
        depends(tmp_path, "python3-doc")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("apt-get") is None or shutil.which("npm") is None, reason="built from Debian and npm")
async def test_the_real_encyclopedia() -> None:
    KnowledgeSearch.fetch({})
    KnowledgeSearch.prepare({})
    found = await examine(Subject(KnowledgeSearch, problems=20))
    assert [finding for finding in found if not finding.ok] == []
    db = corpus.connect("knowledge_search", "full", fill)
    assert db.execute("SELECT COUNT(*) FROM documents").fetchone()[0] > 130_000
    facts = db.execute(
        "SELECT attribute, value, evidence, text FROM facts JOIN documents ON documents.rowid = document"
    ).fetchall()
    assert {row[0] for row in facts} == set(QUESTIONS) and len(facts) > 2000
    for attribute, value, evidence, text in facts:
        assert evidence in text and value in text, (attribute, value)
        assert len(value) > 1 and not re.search(r"\bNA\b|\bnone\b", value)
    known = dict(db.execute("SELECT subject, value FROM facts WHERE attribute = 'capital'").fetchall())
    assert (known["Burkina Faso"], known["Nepal"]) == ("Ouagadougou", "Kathmandu")
    versions = dict(db.execute("SELECT subject, value FROM facts WHERE attribute = 'version'").fetchall())
    assert versions["math.comb()"] == "3.8"
    db.close()


def test_mistakes_in_options_are_named() -> None:
    for options, words in (
        ({"hops_min": 2, "hops_max": 1}, r"hops_min \(2\) must be 1 or 2"),
        ({"results": 0}, r"results \(0\) must be from 1 to 50"),
        ({"page_chars": 10}, r"page_chars \(10\) must be from 200"),
        ({"corpus": "web"}, r"corpus \('web'\) must be one of full, excerpt"),
    ):
        with pytest.raises(ValueError, match=words):
            KnowledgeSearch(**options)


TRANSCRIPT = """\
user: What was the population of the country whose capital is Havana in July 2015?
assistant: <tool_call>
{"name": "search", "arguments": {"query": "Havana Government Capital name"}}
</tool_call>
tool: 28. Cuba: Government -- ...Republica de Cuba Country [name], local short form: Cuba [Government] type: Communist state [Capital], [name]: [Havana]...
38. Austria: Government -- ...of the German [name] [Government] type: federal republic [Capital], [name]: Vienna [Capital], geographic coordinates: 48 12...
assistant: <tool_call>
{"name": "read", "arguments": {"document": 28, "page": 1}}
</tool_call>
tool: Cuba: Government (page 1 of 6)
Country name, conventional long form: Republic of Cuba
Country name, conventional short form: Cuba
Country name, local long form: Republica de Cuba
Country name, local short form: Cuba
Government type: Communist state
Capital, name: Havana
Capital, geographic coordinates: 23 07 N, 82 21 W
Capital, t
assistant: <tool_call>
{"name": "search", "arguments": {"query": "Cuba People and Society Population"}}
</tool_call>
tool: 27. Cuba: People and Society -- ...9.9 births/1,000 [population] (2015 est.) Death rate: 7.72 deaths/1,000 [population]...
32. Japan: People and Society -- ...total adherents exceeds 100% because many [people] practice both Shintoism and Buddhism (2012 est.) [Population]: 126...
assistant: <tool_call>
{"name": "read", "arguments": {"document": 27, "page": 2}}
</tool_call>
tool: Cuba: People and Society (page 2 of 6)
ion: 11,031,433 (July 2015 est.)
Age structure, 0-14 years: 15.96% (male 904,800/female 855,309)
Age structure, 15-24 years: 13.29% (male 752,160/female 714,384)
Age structure, 25-54 years: 47.16% (male 2,620,536/female 2,581,344)
Age structure, 55-64 years: 10.65% (male 562,207/female 612,438)
Age 
assistant: 11,031,433
user: right"""  # noqa: E501
INFO = {"end": "right", "answer": "11,031,433", "attribute": "people"}
