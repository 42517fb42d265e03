"""Check that a config.json describes a model that Stoker serves: `python -m stoker.models.config_check CONFIG_FILE`.

Light processes run this as a child process, because reading a config needs torch. It runs the same code as the engine, so that the
two always agree. Exit code 0: the model is served. Exit code REFUSED: stdout has the error as a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.weight_files import read_json_object
from stoker.models.family import family_of

REFUSED = 3


def main(config: Path) -> int:
    try:
        family_of(read_json_object(config), str(config))
    except ModelFilesError as error:
        print(json.dumps({"message": error.message, "code": error.code}))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
