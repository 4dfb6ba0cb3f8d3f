#!/usr/bin/env bash
# Pillow inverts a grey TIFF whose zero is white at 8 bits, and leaves it inverted at 16 bits.
#
# Packages: pillow 13.0.0.
# Behaviour: with PhotometricInterpretation 0 (WhiteIsZero) the 8-bit values 0, 100, 200 are read
#   as 255, 155, 55, as a viewer shows them. The 16-bit values 0, 25700, 51400 of the same picture
#   are read as they are stored, so dark and light are exchanged. No warning.
# Expected: the same picture at both depths.
# Instead: read the tag 262 of a 16-bit TIFF and subtract from 65535 where it is 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pillow==13.0.0'
cat > expected.txt <<'EXPECTED'
8 bits, BlackIsZero: 0 100 200
8 bits, WhiteIsZero: 255 155 55
16 bits, BlackIsZero: 0 25700 51400
16 bits, WhiteIsZero: 0 25700 51400
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
import io
import struct

from PIL import Image


def tiff(bits, zero, values):
    """Return one row of grey values as an uncompressed TIFF file."""
    pixels = struct.pack('<3B' if bits == 8 else '<3H', *values)
    start = 8 + 2 + 12 * 9 + 4
    shorts = {256: 3, 257: 1, 258: bits, 259: 1, 262: zero, 273: start, 277: 1, 278: 1}
    shorts[279] = len(pixels)
    tags = b''.join(struct.pack('<HHIHH', tag, 3, 1, value, 0) for tag, value in shorts.items())
    return b'II*\0' + struct.pack('<IH', 8, len(shorts)) + tags + struct.pack('<I', 0) + pixels


for bits, values in ((8, (0, 100, 200)), (16, (0, 25700, 51400))):
    for zero, name in ((1, 'BlackIsZero'), (0, 'WhiteIsZero')):
        image = Image.open(io.BytesIO(tiff(bits, zero, values)))
        print(f'{bits} bits, {name}:', *(image.getpixel((x, 0)) for x in range(3)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
