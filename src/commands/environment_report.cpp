#include "commands/environment_report.h"

#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <chrono>
#include <cstdio>

#include "accelerate/checks.h"
#include "accelerate/errors.h"
#include "accelerate/version.h"
#include "core/files.h"
#include "core/json.h"
#include "core/numbers.h"
#include "core/nvml.h"
#include "core/subprocess.h"
#include "core/system.h"
#include "core/text.h"
#include "launch/machine_facts.h"
#include "launch/store_process.h"

namespace accelerate::detail::commands {
namespace {

// The value of "name : value" in a file of /proc; "" if it is not there.
std::string proc_entry(const std::filesystem::path& path, std::string_view name) {
  std::string text;
  try {
    text = read_whole_file(path);
  } catch (const Error&) {
    return "";
  }
  for (const auto& line : split(text, '\n')) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || trim(std::string_view(line).substr(0, colon)) != name)
      continue;
    return std::string(trim(std::string_view(line).substr(colon + 1)));
  }
  return "";
}

std::string platform() {
  utsname name{};
  if (::uname(&name) != 0) return "unknown";
  return str(name.sysname, "-", name.release, "-", name.machine, "-with-glibc",
             ::gnu_get_libc_version());
}

std::string compiler() {
#ifdef __clang__
  return "Clang " __clang_version__;
#else
  return "GCC " __VERSION__;
#endif
}

std::optional<TorchVersions> ask_accelerate_torch() {
  const auto program = launch::find_torch_helper();
  if (program.empty()) return std::nullopt;
  // Loading LibTorch from a cold network drive takes a while.
  const auto output =
      output_of({program, "versions"}, StreamTarget::kNull, std::chrono::seconds(60));
  const auto answer = json_object(trim(output.value_or("")));
  if (!answer || !answer->contains("torch")) return std::nullopt;
  const auto text = [&](const char* key) -> std::optional<std::string> {
    const Value* value = answer->get(key);
    if (value == nullptr || !value->is_string()) return std::nullopt;
    return value->as_string();
  };
  return TorchVersions{.torch = text("torch").value_or(""),
                       .path = text("path").value_or(""),
                       .cuda = text("cuda"),
                       .nccl = text("nccl")};
}

// Python prints True, 'text' as text, and lists as lists.
std::string shown(const Value& value) {
  return value.is_string() ? value.as_string() : value.repr();
}

}  // namespace

EnvironmentReport report_environment(const Environment& environment) {
  EnvironmentReport report{.accelerate_version = std::string(::accelerate::kVersion),
                           .platform = platform(),
                           .location = find_in_path("accelerate", environment),
                           .compiler = compiler(),
                           .libtorch = ask_accelerate_torch()};
  const auto facts = launch::gather_machine_facts(environment);
  report.cuda = facts.visible_count > 0;
  report.cpu = proc_entry("/proc/cpuinfo", "model name");
  report.cpu_cores = physical_core_count();
  report.cpu_threads = static_cast<int>(allowed_cpus().size());
  const auto memory = proc_entry("/proc/meminfo", "MemTotal");  // "24689152 kB"
  report.memory_bytes =
      parse_number<std::int64_t>(memory.substr(0, memory.find(' '))).value_or(0) * 1024;
  if (const Nvml* nvml = Nvml::system()) {
    report.gpus = nvml->device_names().value_or(std::vector<std::string>{});
    report.driver = nvml->driver_version().value_or("");
  }
  return report;
}

std::string EnvironmentReport::text() const {
  std::string out = "\nCopy-and-paste the text below in your GitHub issue\n\n";
  const auto line = [&](std::string_view name, const std::string& value) {
    out += str("- ", name, ": ", value.empty() ? "Not found" : value, "\n");
  };
  line("`Accelerate` version", accelerate_version);
  line("Platform", platform);
  line("`accelerate` bash location", location);
  line("Compiler", compiler);
  line("LibTorch version", libtorch ? str(libtorch->torch, " (", libtorch->path, ")") : "");
  if (libtorch && libtorch->cuda) line("CUDA version", *libtorch->cuda);
  if (libtorch && libtorch->nccl) line("NCCL version", *libtorch->nccl);
  line("PyTorch accelerator", cuda ? "CUDA" : "N/A");
  line("CPU", str(cpu.empty() ? "unknown" : cpu, ", ", cpu_cores, " cores, ", cpu_threads,
                  " threads usable"));
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  char memory[32];
  std::snprintf(memory, sizeof memory, "%.2f GB", static_cast<double>(memory_bytes) / kGiB);
  line("System RAM", memory);
  if (!gpus.empty())
    line("GPU type", gpus.size() == 1 ? gpus[0] : str(gpus.size(), " x ", gpus[0]));
  if (!driver.empty()) line("GPU driver", driver);
  out += config_passed ? "- `Accelerate` config passed:\n" : "- `Accelerate` default config:\n";
  if (!config) return out + "\tNot found\n";
  for (const auto& [key, value] : *config)
    out += str("\t- ", key.to_string(), ": ", shown(value), "\n");
  return out;
}

Value::Dict EnvironmentReport::to_dict() const {
  Value::Dict torch;
  if (libtorch) {
    torch = {{"version", libtorch->torch},
             {"path", libtorch->path},
             {"cuda", libtorch->cuda},
             {"nccl", libtorch->nccl}};
  }
  return {{"accelerate_version", accelerate_version},
          {"platform", platform},
          {"accelerate_location", location.empty() ? Value() : Value(location)},
          {"compiler", compiler},
          {"libtorch", libtorch ? Value(torch) : Value()},
          {"accelerator", cuda ? Value("CUDA") : Value()},
          {"cpu", Value::Dict{{"model", cpu}, {"cores", cpu_cores}, {"threads", cpu_threads}}},
          {"memory_bytes", memory_bytes},
          {"gpus", gpus},
          {"gpu_driver", driver.empty() ? Value() : Value(driver)},
          {"config", config ? Value(*config) : Value()}};
}

}  // namespace accelerate::detail::commands
