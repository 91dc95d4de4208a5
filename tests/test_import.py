import subprocess
import sys


def test_import_stays_light():
    program = (
        "import sys, jax, rsembed; "
        "print([m for m in ('flax', 'orbax', 'tensorly', 'matplotlib', 'pooch', 'tqdm', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
