"""Check that a wheel is for every Python 3 on this platform, holds the library and no MXNet."""

import re
import sys
import zipfile

(path,) = sys.argv[1:]
assert re.search(r"-py3-none-manylinux_\d+_\d+_x86_64\.whl$", path), path
names = zipfile.ZipFile(path).namelist()
for wanted in ("mxbn/__init__.py", "mxbn/libmxbn.so", "mxbn/py.typed", "mxbn/demo/__init__.py"):
    assert wanted in names, f"{wanted} is missing in {path}"
strangers = [n for n in names if not n.startswith(("mxbn/", "mxbn-"))]
assert not strangers, strangers
assert not [n for n in names if "libmxnet" in n]
print(f"{path}: {len(names)} files, as they should be")
