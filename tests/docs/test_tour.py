"""The README's tour, pasted into a real bash with curl against a real service, shows what the page says."""

import os
import shutil

import pytest

from tests.docs.pages import alike, blocks, run
from tests.harness import ROOT

pytestmark = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs bash and curl")


def test_the_tour_shows_what_the_page_says(serve):
    service = serve()
    steps = run(ROOT / "README.md", PATH=os.environ["PATH"], FENCEPOST=service.url, no_proxy="127.0.0.1")
    assert len(steps) >= 11
    for step in steps:
        if step.shown is None:
            assert step.printed == "", step.command
        else:
            assert alike(step.shown.text, step.printed), (
                f"README.md, line {step.command.line}: shown\n{step.shown.text}but it printed\n{step.printed}"
            )


def test_the_page_shows_an_answer_to_every_command_but_the_helpers():
    found = blocks(ROOT / "README.md")
    bash = [block for block in found if block.language == "bash"]
    assert sum(block.language == "json" for block in found) == len(bash) - 1
