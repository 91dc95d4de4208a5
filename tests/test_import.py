import subprocess
import sys


def test_import_stays_light():
    program = (
        "import sys, jax, rsembed; "
        "heavy = ('flax', 'tensorly', 'tensorstore', 'matplotlib', 'pooch', 'tqdm', 'scipy'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
