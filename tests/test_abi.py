"""The bridge to libmxnet.so: its mirrors of MXNet's structures against the headers in the wheel."""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import mxnet as mx
import pytest

PROJECT = Path(__file__).resolve().parents[1]
SOURCES = PROJECT / "src" / "operator"
COMPILER = os.environ.get("CXX", "g++").split()

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"needs the C++ compiler {COMPILER[0]}"
)

# What lies before the map is where MXNet's headers, compiled here, put it; what lies after it is
# one pointer earlier, as the map of GCC 4.8 is one pointer shorter.
CHECKS = """
#include <cstddef>
#include <type_traits>
#include "mxnet_abi.h"

#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // the structures hold strings and maps

namespace abi = mxbn::abi;
constexpr size_t kShift = sizeof(void*);

#define SAME_TYPE(mirror, original, member, other)                       \\
  static_assert(std::is_same<decltype(abi::mirror::member),             \\
                             decltype(nnvm::original::other)>::value,   \\
                #mirror "::" #member " is of another type");
#define SAME_OFFSET(mirror, original, member)                                                \\
  static_assert(offsetof(abi::mirror, member) == offsetof(nnvm::original, member),           \\
                #mirror "::" #member " is elsewhere");
#define SHIFTED(mirror, original, member)                                                    \\
  static_assert(offsetof(abi::mirror, member) + kShift == offsetof(nnvm::original, member),  \\
                #mirror "::" #member " is not one pointer earlier");

SAME_TYPE(NodeAttrs, NodeAttrs, op, op)
SAME_TYPE(NodeAttrs, NodeAttrs, name, name)
SAME_TYPE(NodeAttrs, NodeAttrs, parsed, parsed)
SAME_TYPE(NodeAttrs, NodeAttrs, subgraphs, subgraphs)
SAME_OFFSET(NodeAttrs, NodeAttrs, op)
SAME_OFFSET(NodeAttrs, NodeAttrs, name)
SAME_OFFSET(NodeAttrs, NodeAttrs, dict)
SHIFTED(NodeAttrs, NodeAttrs, parsed)
SHIFTED(NodeAttrs, NodeAttrs, subgraphs)
static_assert(sizeof(abi::NodeAttrs) + kShift == sizeof(nnvm::NodeAttrs), "size of NodeAttrs");
static_assert(alignof(abi::NodeAttrs) == alignof(nnvm::NodeAttrs), "alignment of NodeAttrs");

SAME_TYPE(Node, Node, inputs, inputs)
SAME_TYPE(Node, Node, control_deps, control_deps)
SAME_TYPE(Node, Node, info, info)
SAME_OFFSET(Node, Node, attrs)
SHIFTED(Node, Node, inputs)
SHIFTED(Node, Node, control_deps)
SHIFTED(Node, Node, info)
static_assert(sizeof(abi::Node) + kShift == sizeof(nnvm::Node), "size of Node");

// The map is an unordered_map of two strings, in 48 bytes of GCC 4.8: buckets, their number, the
// first node, the number of nodes, and a policy of a float and a number. Since GCC 4.9 a single
// bucket follows.
static_assert(std::is_same<decltype(nnvm::NodeAttrs::dict),
                           std::unordered_map<std::string, std::string>>::value,
              "dict is another map");
static_assert(sizeof(nnvm::NodeAttrs::dict) == sizeof(abi::StringMap) + kShift, "size of dict");
static_assert(offsetof(abi::StringMap, first) == 2 * sizeof(void*), "first node");
static_assert(offsetof(abi::StringMap, size) == 3 * sizeof(void*), "number of nodes");
// A node is a link, a pair, and (for std::string keys) the hash after it.
using Value = std::pair<const std::string, std::string>;
static_assert(offsetof(abi::StringMap::Node, key) == sizeof(void*) + offsetof(Value, first), "");
static_assert(offsetof(abi::StringMap::Node, value) == sizeof(void*) + offsetof(Value, second), "");
static_assert(offsetof(abi::StringMap::Node, hash) == sizeof(void*) + sizeof(Value), "hash");

// The old std::string is a pointer.
static_assert(sizeof(std::string) == sizeof(void*), "not the old std::string");

// What operators on GPUs are given holds nothing that GCC 4.8 lays out in another way.
static_assert(offsetof(mxnet::RunContext, ctx) == 0, "ctx");
static_assert(sizeof(mxnet::Context) == 2 * sizeof(int), "Context");
static_assert(offsetof(mxnet::RunContext, stream) == sizeof(mxnet::Context), "stream");
static_assert(sizeof(mxnet::RunContext) == 4 * sizeof(void*), "RunContext");
static_assert(offsetof(mxnet::OpContext, is_train) == 1, "is_train");
static_assert(offsetof(mxnet::OpContext, run_ctx) == sizeof(void*), "run_ctx");
static_assert(sizeof(mxnet::engine::CallbackOnComplete) == 3 * sizeof(void*), "CallbackOnComplete");
static_assert(offsetof(mxnet::OpContext, requested) == 8 * sizeof(void*), "requested");
static_assert(sizeof(mxnet::OpContext) == 11 * sizeof(void*), "OpContext");
static_assert(sizeof(mxnet::ResourceRequest) == sizeof(int), "ResourceRequest");
static_assert(sizeof(mxnet::Resource) == 4 * sizeof(void*), "Resource");
// The signature that the operator's workspace is asked for with: numbers by value.
using WorkspaceRequest = std::vector<mxnet::ResourceRequest>(const nnvm::NodeAttrs&, const int,
                                                             const mxnet::DispatchMode);
static_assert(std::is_same<mxnet::FResourceRequestEx, std::function<WorkspaceRequest>>::value,
              "FResourceRequestEx");
"""

# Fills a map of this compiler, which has the nodes of the old one, and reads it through the mirror;
# calls a wrapped function as GCC 4.8 does, with arguments by value.
PROGRAM = """
#include <cstdio>
#include <map>
#include "mxnet_abi.h"

int Twice(int value) { return 2 * value; }
double* Next(double* p, float step) { return p + static_cast<int>(step); }
enum class Mode { kOne, kOther };
std::vector<int> Several(const double& value, const int number, const Mode mode) {
  return std::vector<int>(number, mode == Mode::kOther ? static_cast<int>(value) : 0);
}

int main() {
  namespace abi = mxbn::abi;
  std::unordered_map<std::string, std::string> map;
  std::map<std::string, std::string> seen;
  for (int i = 0; i < 100; ++i) {
    map["key " + std::to_string(i)] = "value " + std::to_string(i * i);
  }
  const auto& mirror = reinterpret_cast<const abi::StringMap&>(map);
  if (mirror.size != 100) return 1;
  for (auto* node = mirror.first; node != nullptr; node = node->next) seen[node->key] = node->value;
  if (seen != std::map<std::string, std::string>(map.begin(), map.end())) return 2;

  using Function = int (*)(const void*, int);
  const auto wrapped = abi::Callable<int(int)>::Wrap(Twice);
  Function invoker;
  std::memcpy(&invoker, reinterpret_cast<const char*>(&wrapped) + 24, sizeof invoker);
  if (invoker(&wrapped, 21) != 42) return 3;
  const auto copy = wrapped;
  std::memcpy(&invoker, reinterpret_cast<const char*>(&copy) + 24, sizeof invoker);
  if (invoker(&copy, -4) != -8) return 4;

  using Walk = double* (*)(const void*, double*, float);
  const auto walk = abi::Callable<double*(double*, float)>::Wrap(Next);
  Walk walker;
  double values[4];
  std::memcpy(&walker, reinterpret_cast<const char*>(&walk) + 24, sizeof walker);
  if (walker(&walk, values, 3.0f) != values + 3) return 5;

  using Maker = std::vector<int> (*)(const void*, const double&, int, Mode);
  const auto several =
      abi::Callable<std::vector<int>(const double&, const int, const Mode)>::Wrap(Several);
  Maker maker;
  std::memcpy(&maker, reinterpret_cast<const char*>(&several) + 24, sizeof maker);
  if (maker(&several, 7.0, 3, Mode::kOther) != std::vector<int>{7, 7, 7}) return 6;
  std::puts("done");
  return 0;
}
"""


def setup_constant(name):
    """Return a list that setup.py assigns, without running setup()."""
    tree = ast.parse((PROJECT / "setup.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return eval(compile(ast.Expression(node.value), "setup.py", "eval"))
    raise AssertionError(f"setup.py has no {name}")


def compile_it(folder, code, header=None, flags=None, end=("-fsyntax-only",)):
    """Compile code as setup.py compiles the files that see MXNet's headers."""
    (folder / "check.cc").write_text(code)
    if header is not None:
        (folder / "mxnet_abi.h").write_text(header)
    command = [
        *COMPILER,
        *setup_constant("COMMON"),
        *(setup_constant("MXNET_FLAGS") if flags is None else flags),
        "-I" + str(folder),
        "-I" + str(SOURCES),
        *("-isystem" + str(Path(mx.libinfo.find_include_path(), sub)) for sub in (".", "mkldnn")),
        str(folder / "check.cc"),
        *end,
    ]
    return subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)


def test_mirrors_have_the_layout_of_the_headers(tmp_path):
    result = compile_it(tmp_path, CHECKS)
    assert result.returncode == 0, result.stderr


WRONG = {
    "swapped members": (
        "std::string name;\n  StringMap dict;",
        "StringMap dict;\n  std::string name;",
    ),
    "a member more": ("dmlc::any parsed;", "dmlc::any parsed;\n  void* more;"),
    "another type": (
        "std::vector<nnvm::NodeEntry> inputs;",
        "std::vector<nnvm::ObjectPtr> inputs;",
    ),
    "swapped vectors": (
        "std::vector<nnvm::NodeEntry> inputs;\n  std::vector<nnvm::ObjectPtr> control_deps;",
        "std::vector<nnvm::ObjectPtr> control_deps;\n  std::vector<nnvm::NodeEntry> inputs;",
    ),
    "map of this compiler": (
        "size_t next_resize;\n",
        "size_t next_resize;\n  void* single_bucket;\n",
    ),
    "swapped members of the map": (
        "size_t bucket_count;\n  Node* first;",
        "Node* first;\n  size_t bucket_count;",
    ),
    "swapped members of a node": (
        "std::string key;\n    std::string value;",
        "std::string value;\n    std::string key;",
    ),
    "hash first": (
        "Node* next;\n    std::string key;",
        "Node* next;\n    size_t hash0;\n    std::string key;",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_mirror_fails(tmp_path, fault):
    header = (SOURCES / "mxnet_abi.h").read_text()
    right, wrong = WRONG[fault]
    assert header.count(right) == 1
    # Without the header's own assertions, which find some of these too.
    planted = re.sub("static_assert\\([^;]*;", "", header.replace(right, wrong))
    result = compile_it(tmp_path, CHECKS, planted)
    assert result.returncode != 0
    assert "static assertion failed" in result.stderr, result.stderr


def test_new_strings_fail(tmp_path):
    flags = [f for f in setup_constant("MXNET_FLAGS") if "CXX11_ABI" not in f]
    result = compile_it(tmp_path, '#include "mxnet_abi.h"', flags=flags)
    assert result.returncode != 0
    assert "needs _GLIBCXX_USE_CXX11_ABI=0" in result.stderr


def test_maps_and_functions_work(tmp_path):
    program = tmp_path / "program"
    result = compile_it(
        tmp_path, PROGRAM, end=("-o", str(program), "-Wl,--unresolved-symbols=ignore-all")
    )
    assert result.returncode == 0, result.stderr
    ran = subprocess.run([str(program)], check=False, stdout=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stdout) == (0, "done\n")


def test_a_stream_of_mxnet_begins_with_that_of_cuda():
    """The one thing that the operator takes from it; the header is for builds with CUDA only."""
    header = Path(mx.libinfo.find_include_path(), "mshadow", "stream_gpu-inl.h").read_text()
    body = re.search(r"struct Stream<gpu> \{(.*?)\n\};", header, re.DOTALL).group(1)
    assert re.search(r"^  \w+ (\w+_?);", body, re.MULTILINE).group(0) == "  cudaStream_t stream_;"
    assert "virtual" not in body
