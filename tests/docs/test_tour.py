"""The README's tour, pasted into a real bash with curl against a real service, shows what the page says."""

import os
import shutil

import pytest

from tests.docs.pages import alike, blocks, run
from tests.harness import ROOT

pytestmark = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs bash and curl")


def test_the_tour_shows_what_the_page_says_and_can_be_taken_twice(serve):
    service = serve()
    for _ in range(2):
        steps = run(ROOT / "README.md", PATH=os.environ["PATH"], FENCEPOST=service.url, no_proxy="127.0.0.1")
        assert len(steps) >= 11
        for step in steps:
            if step.shown is None:
                assert step.printed == "", step.command
            else:
                assert alike(step.shown.text, step.printed), (
                    f"README.md, line {step.command.line}: shown\n{step.shown.text}but it printed\n{step.printed}"
                )


def test_no_block_hurries_the_reader():
    """A lease shorter than the pause between two pasted blocks is one that the next block waits for."""
    found = [block.text for block in blocks(ROOT / "README.md") if block.language == "bash"]
    [short] = [i for i, text in enumerate(found) if '"lease_seconds": 5}' in text]
    assert "/heartbeat" in found[short]
    assert '"wait_seconds"' in found[short + 1]
    # The others have the queue's default or more.
    assert sum(text.count('"lease_seconds"') for text in found) == 2


def test_the_page_shows_an_answer_to_every_command_but_the_helpers():
    found = blocks(ROOT / "README.md")
    bash = [block for block in found if block.language == "bash"]
    assert sum(block.language == "json" for block in found) == len(bash) - 1
