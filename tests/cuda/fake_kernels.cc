// Those of MXNet's own GPU kernels that the fake runtime runs, known by their demangled names:
// fills and copies, which arrays, executors and modules need, and the simplest arithmetic, which
// tests put around the operator.
#include "fake_kernels.h"

#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <regex>
#include <string>
#include <vector>

#include "float16.h"

namespace {

using Arguments = void* const*;
using Kernel = std::function<void(Arguments)>;

// ---------------------------------------------------------------------------- values of a type

struct Type {
  size_t size;
  double (*load)(const void*);
  void (*store)(void*, double);
};

template <typename T>
double LoadAs(const void* from) {
  return static_cast<double>(*static_cast<const T*>(from));
}
template <typename T>
void StoreAs(void* to, double value) {
  *static_cast<T*>(to) = static_cast<T>(value);
}
template <>
double LoadAs<mxbn::Half>(const void* from) {
  return mxbn::HalfToFloat(*static_cast<const mxbn::Half*>(from));
}
template <>
void StoreAs<mxbn::Half>(void* to, double value) {
  *static_cast<mxbn::Half*>(to) = mxbn::FloatToHalf(static_cast<float>(value));
}
template <typename T>
constexpr Type TypeOf() {
  return {sizeof(T), LoadAs<T>, StoreAs<T>};
}

const std::map<std::string, Type> kTypes = {
    {"mshadow::half::half_t", TypeOf<mxbn::Half>()},
    {"float", TypeOf<float>()},
    {"double", TypeOf<double>()},
    {"bool", TypeOf<bool>()},
    {"signed char", TypeOf<int8_t>()},
    {"unsigned char", TypeOf<uint8_t>()},
    {"int", TypeOf<int32_t>()},
    {"long", TypeOf<int64_t>()},
};

const char* const kType =
    R"((mshadow::half::half_t|float|double|bool|(?:un)?signed char|int|long))";

// Replaces T, in a pattern, by a group that matches a type, and # by one that matches a number.
std::regex Pattern(const std::string& text) {
  const std::string with_types = std::regex_replace(text, std::regex("\\bT\\b"), kType);
  return std::regex(std::regex_replace(with_types, std::regex("#"), "(\\d+)"));
}

// ------------------------------------------------------------------------- value by value kernels

// mxnet_op's kernels of (n, out, a, b, c): out[i] = f(a[i], b[i], c[i]), where each of up to three
// inputs is an array or a scalar.
struct Operand {
  Type type;
  bool is_array;

  char* At(void* argument, int i) const {
    return is_array ? *static_cast<char**>(argument) + i * type.size : static_cast<char*>(argument);
  }
};

constexpr int kMostInputs = 3;
constexpr int kAddTo = 3;  // mxnet::OpReqType
using Formula = double (*)(const double*);
const std::map<std::string, Formula> kFormulas = {
    {"mshadow_op::identity", [](const double* in) { return in[0]; }},
    {"mshadow_op::negation", [](const double* in) { return -in[0]; }},
    {"mshadow_op::plus", [](const double* in) { return in[0] + in[1]; }},
    {"mshadow_op::minus", [](const double* in) { return in[0] - in[1]; }},
    {"mshadow_op::mul", [](const double* in) { return in[0] * in[1]; }},
    // The gradients of a product.
    {"mxnet_op::backward_grad_tuned<mxnet::op::mshadow_op::left>",
     [](const double* in) { return in[0] * in[1]; }},
    {"mxnet_op::backward_grad_tuned<mxnet::op::mshadow_op::right>",
     [](const double* in) { return in[0] * in[2]; }},
    {"mxnet_op::set_to_int<0>", [](const double*) { return 0.0; }},
    {"mxnet_op::set_to_int<1>", [](const double*) { return 1.0; }},
};

void RunByValue(Formula formula, bool add, const std::vector<Operand>& operands,
                Arguments arguments) {
  const int n = *static_cast<int*>(arguments[0]);
  for (int i = 0; i < n; ++i) {
    double inputs[kMostInputs] = {};
    for (size_t k = 1; k < operands.size(); ++k) {
      inputs[k - 1] = operands[k].type.load(operands[k].At(arguments[k + 1], i));
    }
    char* const out = operands[0].At(arguments[1], i);
    const double old = add ? operands[0].type.load(out) : 0;
    operands[0].type.store(out, old + formula(inputs));
  }
}

Kernel ByValue(const std::string& name) {
  static const std::regex pattern(
      "void mxnet::op::mxnet_op::mxnet_generic_kernel<"
      "(?:mxnet::op::mxnet_op::op_with_req<mxnet::op::(.*), ([123])>|mxnet::op::(mxnet_op::.*>)), "
      ".*>\\(int, (.*)\\)");
  std::smatch match;
  if (!std::regex_match(name, match, pattern)) return nullptr;
  const auto formula = kFormulas.find(match[1].matched ? match[1] : match[3]);
  if (formula == kFormulas.end()) return nullptr;
  const bool add = match[2].matched && std::stoi(match[2]) == kAddTo;
  std::vector<Operand> operands;
  const std::string types = match[4];
  static const std::regex type_pattern("([^,*]+?)(?: const)?(\\*?)(?:, |$)");
  for (std::sregex_iterator it(types.begin(), types.end(), type_pattern), end; it != end; ++it) {
    const auto type = kTypes.find((*it)[1]);
    if (type == kTypes.end() || operands.size() > kMostInputs) return nullptr;
    operands.push_back({type->second, (*it)[2].length() == 1});
  }
  if (!operands[0].is_array) return nullptr;
  return [=](Arguments arguments) { RunByValue(formula->second, add, operands, arguments); };
}

// ElementWiseSum of two arrays: (n, out, request, a, b). A half2_t is two values.
Kernel SumOfTwo(const std::string& name) {
  static const std::regex pattern(
      "void mxnet::op::mxnet_op::mxnet_generic_kernel<mxnet::op::Sum, "
      "(mshadow::half::half2_t|float|double)\\*, mxnet::OpReqType, \\1\\*, \\1\\*>\\(.*");
  std::smatch match;
  if (!std::regex_match(name, match, pattern)) return nullptr;
  const bool pairs = match[1] == "mshadow::half::half2_t";
  const Type type = kTypes.at(pairs ? "mshadow::half::half_t" : match[1].str());
  return [=](Arguments arguments) {
    const int n = *static_cast<int*>(arguments[0]), request = *static_cast<int*>(arguments[2]);
    const Operand array{type, true};
    for (int i = 0; i < (pairs ? 2 * n : n); ++i) {
      char* const out = array.At(arguments[1], i);
      const double old = request == kAddTo ? type.load(out) : 0;
      const double a = type.load(array.At(arguments[3], i)),
                   b = type.load(array.At(arguments[4], i));
      type.store(out, old + a + b);
    }
  };
}

// ------------------------------------------------------------------------------ mshadow's kernels

// What mshadow calls a plan: where the value of (row, col) lies. As kernels are given it.
struct Matrix {
  char* data;
  int stride;  // not there for tensors of one dimension

  char* At(int row, int col, size_t size) const {
    return data + (row == 0 ? col : static_cast<int64_t>(row) * stride + col) * size;
  }
};
struct Slice {
  Matrix from;
  int height, begin, old_channels, channels;

  char* At(int row, int col, size_t size) const {
    const int y = row % height, channel = row / height % channels + begin;
    const int outer = row / height / channels;
    return from.At((outer * old_channels + channel) * height + y, col, size);
  }
};

// The value at (row, col) of an expression, whose plan is given.
using Expression = std::function<double(const void* plan, int row, int col)>;

struct ExpressionPattern {
  std::regex pattern;
  Expression (*make)(const Type& type);  // the first that the pattern matches
};

const std::string kTensor = "mshadow::Tensor<mshadow::gpu, #, T>";
const ExpressionPattern kExpressions[] = {
    {Pattern("mshadow::expr::ScalarExp<T>"),
     [](const Type& type) -> Expression {
       return [=](const void* plan, int, int) { return type.load(plan); };
     }},
    {Pattern("mshadow::expr::TypecastExp<(?:.*), T, " + kTensor + ", 1>"),
     [](const Type& type) -> Expression {
       return [=](const void* plan, int row, int col) {
         return type.load(static_cast<const Matrix*>(plan)->At(row, col, type.size));
       };
     }},
    {Pattern("mshadow::expr::BinaryMapExp<mshadow::op::plus, mshadow::Tensor<mshadow::gpu, 2, T>, "
             "mshadow::Tensor<mshadow::gpu, 2, (?:.*)>, (?:.*), 1>"),
     [](const Type& type) -> Expression {
       return [=](const void* plan, int row, int col) {
         const auto* terms = static_cast<const Matrix*>(plan);
         return type.load(terms[0].At(row, col, type.size)) +
                type.load(terms[1].At(row, col, type.size));
       };
     }},
    {Pattern(
         "mshadow::expr::SliceExp<mshadow::Tensor<mshadow::gpu, [23], T>, mshadow::gpu, (?:.*), "
         "[23], [2-9]>"),
     [](const Type& type) -> Expression {
       return [=](const void* plan, int row, int col) {
         return type.load(static_cast<const Slice*>(plan)->At(row, col, type.size));
       };
     }},
};

// MapPlanKernel(to, stride, shape, expression): assigns the expression to a tensor.
Kernel Assignment(const std::string& name) {
  static const std::regex pattern =
      Pattern("void mshadow::cuda::MapPlanKernel<mshadow::sv::saveto, 8, mshadow::expr::Plan<" +
              kTensor + ", (?:.*?)>, mshadow::expr::Plan<(.*), (?:[^>]*)> >\\(.*");
  std::smatch match, inner;
  if (!std::regex_match(name, match, pattern)) return nullptr;
  const Type to_type = kTypes.at(match[2]);
  const std::string text = match[3];
  for (const ExpressionPattern& each : kExpressions) {
    if (!std::regex_match(text, inner, each.pattern)) continue;
    std::string type = inner[1];
    const Expression expression = each.make(kTypes.at(type));
    return [=](Arguments arguments) {
      const auto& to = *static_cast<const Matrix*>(arguments[0]);
      const int* const shape = static_cast<const int*>(arguments[2]);
      for (int row = 0; row < shape[0]; ++row) {
        for (int col = 0; col < shape[1]; ++col) {
          to_type.store(to.At(row, col, to_type.size), expression(arguments[3], row, col));
        }
      }
    };
  }
  return nullptr;
}

Kernel Find(const char* mangled) {
  int status;
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  if (demangled == nullptr) return nullptr;
  const std::string name = demangled;
  std::free(demangled);
  for (const auto make : {ByValue, SumOfTwo, Assignment}) {
    if (const Kernel kernel = make(name)) return kernel;
  }
  return nullptr;
}

}  // namespace

int fake_kernels_run(const char* name, void** arguments) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, Kernel>;  // used until the process ends
  mutex.lock();
  auto at = known.find(name);
  if (at == known.end()) at = known.emplace(name, Find(name)).first;
  const Kernel& kernel = at->second;
  mutex.unlock();
  if (!kernel) return 0;
  kernel(arguments);
  return 1;
}
