"""Print the seconds of each folder of the tests: python tests/seconds.py REPORT.xml, of `pytest --junitxml REPORT.xml`.

Seconds of one worker, summed over tests, with their fixtures.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from xml.etree import ElementTree


def main() -> None:
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        folders = (case.get("classname") or "").split(".")[1:-1]  # tests.FOLDER.module; none for files outside folders
        seconds["/".join(["tests", *folders])] += float(case.get("time") or 0)
    for folder, total in sorted(seconds.items()):
        print(f"{folder:24} {total:6.0f}")


if __name__ == "__main__":
    main()
