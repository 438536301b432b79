"""Check what a wheel is for, and that it holds the library with its device code and no MXNet."""

import re
import subprocess
import sys
import tempfile
import zipfile

(path,) = sys.argv[1:]
assert re.search(r"-py3-none-manylinux_\d+_\d+_x86_64\.whl$", path), path
wheel = zipfile.ZipFile(path)
names = wheel.namelist()
for wanted in ("mxbn/__init__.py", "mxbn/libmxbn.so", "mxbn/py.typed", "mxbn/demo/__init__.py"):
    assert wanted in names, f"{wanted} is missing in {path}"
strangers = [n for n in names if not n.startswith(("mxbn/", "mxbn-"))]
assert not strangers, strangers
assert not [n for n in names if "libmxnet" in n]

library = wheel.read("mxbn/libmxbn.so")
machine_code = library.count(b"\x7fELF\x02\x01\x01\x33")  # files of machine code for GPUs
ptx = re.findall(rb"\n\.target (\w+)\n", library)
assert (machine_code, ptx) == (8, [b"sm_90"]), (machine_code, ptx)
with tempfile.NamedTemporaryFile() as file:
    file.write(library)
    file.flush()
    dynamic = subprocess.check_output(["readelf", "--dynamic", file.name], encoding="utf-8")
needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
known = {"libmxnet.so", "libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1"}
known |= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
assert needed <= known, needed - known
print(f"{path}: {len(names)} files, as they should be")
