// An MLX primitive that runs a host-compiled Metal kernel: lazy.py's native half.
//
// It stands where MLX's CustomKernel would: part of the graph, evaluated on a CPU
// stream in order with everything else, so kernels work under mx.grad (through
// mx.custom_function), mx.compile and mx.jvp as they do on a GPU.
//
// What a launch reports is kept until lazy.py takes it; a fault is thrown, and surfaces
// where the arrays are evaluated, unless the launch belongs to a recording.
//
// Built on first use by lazy.py; it is no part of the wheel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <sstream>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "runtime/interface.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace {

using Triple = std::tuple<int, int, int>;
using LaunchFunction = decltype(&mtl_launch);

struct Call {
  uint64_t launch, invoke;  // addresses of mtl_launch and of the kernel
  std::string name;
  std::vector<std::string> buffer_names;
  Triple grid, threadgroup;
  std::vector<std::tuple<bool, bool, bool>> metadata;  // shape, strides, ndim wanted
  std::optional<float> init_value;
  int checked;
  int64_t source;  // lazy.py's number of the kernel's source
};

// How kernels run that are evaluated now: a compiled graph outlives the block in which
// it was traced, so the graph cannot hold this.
struct Setting {
  int order = 0, seed = 0, workers = 1;
  int64_t recording = -1;  // nobody listens: throw faults
};
Setting setting;

struct Record {
  int64_t recording, source;
  int checked;
  mtlhost::Counts counts;
  std::vector<std::pair<std::string, std::vector<uint64_t>>> traffic;
  std::string faults;
};
std::mutex records_mutex;
std::vector<Record> records;

// What the kernel gets of an input besides its data.
struct Metadata {
  std::vector<int> shape;
  std::vector<int64_t> strides;
  int ndim;
};

void fill(const mtlhost::Buffer& b, mx::Dtype type, float value) {
  auto with = [&]<class T>(T v) {
    std::fill_n(static_cast<T*>(b.data), b.size / sizeof(T), v);
  };
  if (type == mx::float32) return with(value);
  if (type == mx::float16) return with(mx::float16_t(value));
  if (type == mx::bfloat16) return with(mx::bfloat16_t(value));
  switch (type.size()) {
    case 1:
      return with(int8_t(value));
    case 2:
      return with(int16_t(value));
    case 4:
      return with(int32_t(int64_t(value)));
    default:
      return with(int64_t(value));
  }
}

std::string first_fault(const std::string& name, const std::string& report) {
  std::istringstream line(report.substr(0, report.find('\n')));
  std::string kind, place, times, message;
  std::getline(line, kind, '\t');
  std::getline(line, place, '\t');
  std::getline(line, times, '\t');
  std::getline(line, message);
  return name + ": " + kind + (place.empty() ? "" : " at " + place) + ": " + message;
}

void run(const Call& call, const Setting& setting,
         std::vector<mtlhost::Buffer>& buffers, const std::vector<mx::Dtype>& outputs) {
  size_t first_output = buffers.size() - outputs.size();
  for (size_t i = 0; i < buffers.size(); ++i)
    buffers[i].name = call.buffer_names[i].c_str();
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto& b = buffers[first_output + i];
    if (call.init_value)
      fill(b, outputs[i], *call.init_value);
    else
      std::fill_n(static_cast<uint8_t*>(b.data), b.size, 0xFF);
  }
  auto dimensions = [](Triple t) {
    auto [x, y, z] = t;
    return mtlhost::U3{uint32_t(x), uint32_t(y), uint32_t(z)};
  };
  mtlhost::LaunchOptions options{
      dimensions(call.grid),  dimensions(call.threadgroup), uint32_t(setting.order),
      uint32_t(setting.seed), uint32_t(setting.workers),    uint32_t(call.checked)};
  mtlhost::Counts counts;
  std::string report(1 << 16, '\0');
  auto launch = reinterpret_cast<LaunchFunction>(call.launch);
  launch(reinterpret_cast<mtlhost::Invoke>(call.invoke), buffers.data(),
         int(buffers.size()), &options, &counts, report.data(), report.size());
  report.resize(report.find('\0'));
  if (setting.recording < 0) {
    if (!report.empty()) throw std::runtime_error(first_fault(call.name, report));
    return;
  }
  Record record{setting.recording, call.source, call.checked, counts, {}, report};
  if (call.checked)
    for (auto& b : buffers)
      record.traffic.push_back({b.name,
                                {b.read_bytes, b.written_bytes, b.atomics,
                                 b.distinct_read_bytes, b.distinct_written_bytes,
                                 b.read_lines, b.read_line_bytes, b.written_lines,
                                 b.written_line_bytes}});
  std::lock_guard<std::mutex> lock(records_mutex);
  records.push_back(std::move(record));
}

class HostKernel : public mx::Primitive {
 public:
  HostKernel(mx::Stream stream, Call call)
      : mx::Primitive(stream), call_(std::move(call)) {}

  void eval_cpu(const std::vector<mx::array>& inputs,
                std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    auto metadata = std::make_shared<std::vector<Metadata>>(inputs.size());
    std::vector<mtlhost::Buffer> buffers;
    auto add = [&](const void* data, size_t size, uint64_t flags, uint64_t start = 0) {
      start %= mtlhost::kBufferAlign;
      buffers.push_back(
          {const_cast<void*>(data), size, nullptr, flags, start});
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
      const mx::array& x = inputs[i];
      encoder.set_input_array(x);
      size_t last = 0;  // the element that lies farthest from data()
      for (int d = 0; d < int(x.ndim()); ++d) {
        if (x.strides()[d] < 0)
          throw std::runtime_error(call_.name + ": negative strides are not supported");
        if (x.shape(d)) last += size_t(x.shape(d) - 1) * x.strides()[d];
      }
      add(x.data<char>(), x.size() ? (last + 1) * x.itemsize() : 0,
          mtlhost::kInitialised, x.offset());
      if (!x.ndim()) continue;
      Metadata& m = (*metadata)[i];
      m.shape.assign(x.shape().begin(), x.shape().end());
      m.strides.assign(x.strides().begin(), x.strides().end());
      m.ndim = int(x.ndim());
      auto [shape, strides, ndim] = call_.metadata[i];
      if (shape) add(m.shape.data(), m.shape.size() * 4, mtlhost::kInitialised);
      if (strides) add(m.strides.data(), m.strides.size() * 8, mtlhost::kInitialised);
      if (ndim) add(&m.ndim, 4, mtlhost::kInitialised);
    }
    std::vector<mx::Dtype> types;
    for (auto& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
      encoder.set_output_array(out);
      add(out.data<char>(), out.nbytes(),
          mtlhost::kOutput | (call_.init_value ? mtlhost::kInitialised : 0));
      types.push_back(out.dtype());
    }
    encoder.dispatch([call = call_, now = setting, buffers = std::move(buffers),
                      metadata, types]() mutable { run(call, now, buffers, types); });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("a host kernel runs on a CPU stream only");
  }
  const char* name() const override { return "HostMetalKernel"; }

 private:
  Call call_;
};

}  // namespace

NB_MODULE(metal_host_primitive, m) {
  m.def(
      "launch",
      [](const std::vector<mx::array>& inputs,
         const std::vector<std::vector<int>>& shapes,
         const std::vector<mx::Dtype>& dtypes, mx::StreamOrDevice stream,
         uint64_t launch, uint64_t invoke, std::string name,
         std::vector<std::string> buffer_names, Triple grid, Triple threadgroup,
         std::vector<std::tuple<bool, bool, bool>> metadata,
         std::optional<float> init_value, int checked, int64_t source) {
        std::vector<mx::Shape> sizes;
        for (auto& s : shapes) sizes.emplace_back(s.begin(), s.end());
        Call call{launch,  invoke,      std::move(name),     std::move(buffer_names),
                  grid,    threadgroup, std::move(metadata), init_value,
                  checked, source};
        return mx::array::make_arrays(
            sizes, dtypes,
            std::make_shared<HostKernel>(mx::to_stream(stream), std::move(call)),
            inputs);
      },
      "inputs"_a, "shapes"_a, "dtypes"_a, "stream"_a, "launch"_a, "invoke"_a, "name"_a,
      "buffer_names"_a, "grid"_a, "threadgroup"_a, "metadata"_a, "init_value"_a.none(),
      "checked"_a, "source"_a);
  m.def(
      "set",
      [](int order, int seed, int workers, int64_t recording) {
        setting = {order, seed, workers, recording};
      },
      "order"_a, "seed"_a, "workers"_a, "recording"_a);
  m.def(
      "take",
      [](int64_t recording) {
        std::lock_guard<std::mutex> lock(records_mutex);
        nb::list taken;
        std::erase_if(records, [&](const Record& r) {
          if (r.recording != recording) return false;
          nb::bytes counts(reinterpret_cast<const char*>(&r.counts), sizeof r.counts);
          taken.append(
              nb::make_tuple(r.source, bool(r.checked), counts, r.traffic, r.faults));
          return true;
        });
        return taken;
      },
      "recording"_a);
}
