"""The shop: a transcript, rewards by what was chosen, and the real catalogue."""

from __future__ import annotations

import random
import re
import shutil
from functools import partial
from statistics import fmean

import pytest

from envs.check import Subject, examine
from envs.data.debian_catalogue import _programs
from envs.data.text_search import terms
from envs.episodes import expert, play
from envs.protocol import Environment, Step
from envs.shop import Shop
from envs.tools import write_call
from rl.stream import derive_seed
from rl.trajectory import Message, Problem


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "test", 0, derive_seed("test", seed), split)


def first_hit(environment: Environment, messages: list[Message]) -> str:
    """Looks for the section, and takes the first program found: it knows the shop, but does not look at wishes."""
    found = re.match(r"1\. ([^:]+): ", messages[-1].content)
    if found:
        return write_call("choose", name=found[1])
    section = re.search(r"section (\w+)", messages[1].content)
    assert section is not None
    return write_call("search", query=section[1])


async def call(environment: Shop, name: str, /, **arguments: object) -> Step:
    return await environment.step(write_call(name, **arguments))


async def test_transcript() -> None:
    environment = Shop(corpus="excerpt", wishes_min=2, wishes_max=2)
    episode = await play(environment, problem(0), expert, 10)
    await environment.close()
    assert "\n".join(f"{m.role}: {m.content}" for m in episode.messages[1:]) == TRANSCRIPT
    assert episode.steps[-1].info == INFO


async def test_it_keeps_the_promises_of_an_environment() -> None:
    found = await examine(Subject(partial(Shop, corpus="excerpt"), problems=15))
    assert [finding for finding in found if not finding.ok] == []


async def test_one_who_does_not_look_at_the_wishes_scores_badly() -> None:
    rewards = []
    for seed in range(60):
        environment = Shop(corpus="excerpt", wishes_min=4, wishes_max=6)
        rewards.append((await play(environment, problem(seed), first_hit, 5)).reward)
        await environment.close()
    assert fmean(rewards) < 0.5


async def test_the_reward_is_the_share_of_wishes_fulfilled_within_the_section() -> None:
    """Of every program of the excerpt, by what its own page says."""
    environment = Shop(corpus="excerpt", wishes_min=3, wishes_max=3)
    opening = (await environment.reset(problem(5)))[-1].content
    section = opening.partition("section ")[2].partition(".")[0]
    *wishes, limit = re.findall(r"^- (.*)$", opening, re.MULTILINE)
    db = environment._db
    assert db is not None
    names = await environment.in_thread(lambda: [n for (n,) in db.execute("SELECT name FROM programs")])
    rewards = set()
    for name in names:
        page = (await call(environment, "open", name=name)).observation.content.splitlines()
        fits = page[2].removeprefix("size: ").removesuffix(" kB")
        met = sum(wish in page for wish in wishes) + (int(fits) <= int(limit.split()[1]))
        step = await call(environment, "choose", name=name)
        assert step.terminated and step.reward == (met / 4 if f"section: {section}" in page else 0.0)
        rewards.add(step.reward)
    assert len(names) > 200 and rewards >= {0.0, 0.25, 0.5, 1.0}
    await environment.close()


async def test_the_shop_window() -> None:
    environment = Shop(corpus="excerpt")
    await environment.reset(problem(0))
    pages = [(await call(environment, "search", query="a game", page=page)).observation.content for page in (1, 2)]
    assert [page.splitlines()[0].partition(".")[0] for page in pages] == ["1", "11"]
    assert (await call(environment, "search", query="qqqqq")).observation.content == "nothing found"
    names = re.findall(r"^\d+\. ([^:]+):", pages[0], re.MULTILINE)
    compared = (await call(environment, "compare", names=names[:2])).observation.content
    single = [(await call(environment, "open", name=name)).observation.content for name in names[:2]]
    assert compared == "\n\n".join(single)
    await environment.close()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("search", {"query": "the of"}, "some words"),
        ("search", {"query": '" ( *'}, "some words"),
        ("search", {"query": '"qqq" NEAR ( *'}, "nothing found"),
        ("search", {"query": "game", "page": 0}, "page 0"),
        ("search", {"query": "game", "page": 10**30}, "page 1000"),
        ("open", {"name": "no-such"}, "no program 'no-such'"),
        ("open", {"name": "\ud800"}, ""),
        ("open", {"name": "\x00"}, "no program"),
        ("compare", {"names": ["a"] * 5}, "too many"),
        ("choose", {"name": ""}, "no program"),
    ],
)
async def test_whatever_is_asked_is_answered(name: str, arguments: dict[str, object], words: str) -> None:
    environment = Shop(corpus="excerpt")
    await environment.reset(problem(0))
    step = await call(environment, name, **arguments)
    assert words in step.observation.content and not step.terminated
    await environment.close()


async def test_an_answer_in_words_is_no_choice() -> None:
    environment = Shop(corpus="excerpt")
    await environment.reset(problem(0))
    step = await environment.step("I take 0ad")
    assert (step.error, step.terminated, step.reward) == ("invalid", False, None)
    await environment.close()


def test_search_terms_can_not_break_the_query() -> None:
    found = terms('What is the "capital" of Burkina-Faso? NEAR(x) *')
    assert found == ['"capital"', '"burkina"', '"faso"', '"near"', '"x"']
    assert terms("of the and") == [] and terms("x " * 500) == ['"x"']
    assert len(terms(" ".join(map(str, range(500))))) == 16


def test_the_catalogue_is_read_from_the_archives_fields() -> None:
    stanzas = (
        "Package: one\nInstalled-Size: 7\nDescription: does one: thing\nTag: role::program, interface::web,\n"
        " use::editing, use::TODO, suite::gnu\nSection: contrib/editors\n\n"
        "Package: one\nDescription: again\nTag: role::program, interface::web, use::editing\nSection: editors\n\n"
        "Package: library\nDescription: no program\nTag: interface::web, use::editing\nSection: libs\n\n"
        "Package: bare\nTag: role::program, interface::web, use::editing\n\n"
        "Package: plain\nDescription: few tags\nTag: role::program, use::editing\nSection: editors\n"
    )
    assert list(_programs(stanzas)) == [
        {
            "name": "one",
            "text": "does one: thing",
            "section": "editors",
            "size": 7,
            "tags": ["interface::web", "use::editing"],
        }
    ]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="the catalogue is Debian's")
async def test_the_real_catalogue() -> None:
    Shop.fetch({})
    Shop.prepare({})
    found = await examine(Subject(Shop, problems=20))
    assert [finding for finding in found if not finding.ok] == []
    rng, sections = random.Random(0), set()
    for _ in range(30):
        environment = Shop()
        opening = await environment.reset(problem(rng.randrange(10**6)))
        sections.add(opening[-1].content.partition(". Wished")[0])
        await environment.close()
    assert len(sections) > 8


def test_mistakes_in_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"wishes_min \(3\) must be from 1 to wishes_max \(2\)"):
        Shop(3, 2)
    with pytest.raises(ValueError, match=r"corpus \('half'\) must be one of full, excerpt"):
        Shop(corpus="half")  # type: ignore[arg-type]


TRANSCRIPT = """\
user: Choose a program of the section graphics. Wished for:
- reads or writes the format: rdf:xml
- works with: semantic-data
- size: 100 kB at most
assistant: <tool_call>
{"name": "search", "arguments": {"query": "command line tool to manipulate XMP metadata"}}
</tool_call>
tool: 1. exempi: command line tool to manipulate XMP metadata
2. pulseaudio-utils: Command line tools for the PulseAudio sound server
3. id3v2: command line id3v2 tag editor
4. pmidi: command line midi player for ALSA
5. xmp: module player supporting AWE32, GUS, and software-mixing
6. rio: Command line Diamond Rio MP3 player controller
7. vorbis-tools: several Ogg Vorbis tools
8. speech-tools: Edinburgh Speech Tools - user binaries
9. xracer-tools: Futuristic racing game - developer tools
10. icnsutils: utilities for manipulating Mac OS icns files
assistant: <tool_call>
{"name": "open", "arguments": {"name": "exempi"}}
</tool_call>
tool: exempi: command line tool to manipulate XMP metadata
section: graphics
size: 52 kB
implemented in: c
interface: commandline
use: converting
use: editing
reads or writes the format: rdf:xml
works with: semantic-data
assistant: <tool_call>
{"name": "choose", "arguments": {"name": "exempi"}}
</tool_call>
tool: 3 of 3 wishes fulfilled"""
INFO = {"chosen": "exempi", "met": 3, "wishes": 3, "section": True}
