"""Tests marked `engine` start the real vLLM; everything else needs no engine: pytest -m "not engine"."""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
