#include "launch/dry_run.h"

#include <array>
#include <utility>

#include "accelerate/value.h"
#include "core/json.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "launch/messages.h"

namespace accelerate::detail::launch {
namespace {

std::string_view name_of(LaunchMode mode) {
  constexpr std::array<std::string_view, 3> kNames{"simple", "agent", "command"};
  return kNames.at(static_cast<std::size_t>(mode));
}

std::string_view name_of(SettingSource source) {
  constexpr std::array<std::string_view, 4> kNames{"flag", "environment", "config", "default"};
  return kNames.at(static_cast<std::size_t>(source));
}

std::string explanation(const LaunchPlan& plan) {
  if (plan.mode == LaunchMode::kSimple) return "simple: this process becomes the program";
  if (plan.mode == LaunchMode::kCommand) return "command: this process becomes another launcher";
  const auto& agent = plan.agent;
  const std::string machines =
      agent.min_nodes == agent.max_nodes
          ? str(agent.max_nodes, agent.max_nodes == 1 ? " machine" : " machines")
          : str(agent.min_nodes, " to ", agent.max_nodes, " machines");
  return str("agent: ", agent.nproc_per_node, agent.nproc_per_node == 1 ? " process" : " processes",
             " here, ", machines);
}

Value streams_value(const StreamChoice& choice) {
  if (choice.by_local_rank.empty()) return str(static_cast<int>(choice.all));
  std::vector<std::string> parts;
  for (const auto& [rank, streams] : choice.by_local_rank) {
    parts.push_back(str(rank, ":", static_cast<int>(streams)));
  }
  return join(parts, ",");
}

Value map_value(const std::map<std::string, std::string>& map) {
  Value::Dict dict;
  for (const auto& [name, value] : map) dict.set(name, value);
  return dict;
}

Value agent_value(const LaunchConfig& agent) {
  std::vector<std::string> signals;
  for (const int signal : agent.signals_to_handle) signals.push_back(signal_name(signal));
  return Value::Dict{
      {"min_nodes", agent.min_nodes},
      {"max_nodes", agent.max_nodes},
      {"nproc_per_node", agent.nproc_per_node},
      {"node_rank", agent.node_rank},
      {"run_id", agent.run_id},
      {"role", agent.role},
      {"rdzv_backend", agent.rdzv_backend},
      {"rdzv_conf", map_value(agent.rdzv_configs)},
      {"master_addr", agent.master_addr},
      {"master_port", agent.master_port},
      {"local_addr", agent.local_addr.empty() ? Value() : Value(agent.local_addr)},
      {"max_restarts", agent.max_restarts},
      {"monitor_interval", agent.monitor_interval},
      {"log_dir", agent.logs.log_dir ? Value(agent.logs.log_dir->string()) : Value()},
      {"redirects", streams_value(agent.logs.redirects)},
      {"tee", streams_value(agent.logs.tee)},
      {"local_ranks_filter", agent.logs.local_ranks_filter},
      {"log_line_prefix_template", agent.log_line_prefix_template},
      {"signals_to_handle", signals},
      {"shutdown_timeout", agent.shutdown_timeout.count()}};
}

Value process_value(const PlannedProcess& process) {
  return Value::Dict{{"rank", process.rank},
                     {"local_rank", process.local_rank},
                     {"command", process.argv},
                     {"environment", map_value(process.variables)}};
}

std::string title(const PlannedProcess& process) {
  if (process.rank) return str("rank ", *process.rank);
  if (process.local_rank) {
    return str("local rank ", *process.local_rank, " (ranks are given when the machines meet)");
  }
  return "process";
}

}  // namespace

std::vector<PlannedProcess> planned_processes(const LaunchPlan& plan,
                                              const Environment& environment, bool agent_store) {
  if (plan.mode != LaunchMode::kAgent) {
    return {PlannedProcess{.argv = plan.argv, .variables = plan.variables}};
  }
  const LaunchConfig& agent = plan.agent;
  const bool numbered = agent.max_nodes == 1 || !agent.elastic();
  const int node_rank = numbered ? agent.node_rank : 0;
  const LaunchRound round{.node_rank = node_rank,
                          .nodes = agent.max_nodes,
                          .first_rank = node_rank * agent.nproc_per_node,
                          .world_size = agent.max_nodes * agent.nproc_per_node};
  std::vector<PlannedProcess> processes;
  for (int local_rank = 0; local_rank < agent.nproc_per_node; ++local_rank) {
    PlannedProcess process{
        .local_rank = local_rank,
        .argv = worker_arguments(plan.argv, local_rank),
        .variables = worker_variables(agent, round, local_rank, agent_store, environment)};
    if (numbered) {
      process.rank = round.first_rank + local_rank;
    } else {
      for (const auto* name : {"RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE",
                               "GROUP_WORLD_SIZE"}) {
        process.variables.erase(name);
      }
    }
    process.variables.insert(plan.variables.begin(), plan.variables.end());
    processes.push_back(std::move(process));
  }
  return processes;
}

std::string shell_line(const std::vector<std::string>& argv) {
  std::vector<std::string> words;
  for (const auto& word : argv) {
    constexpr std::string_view kPlain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
      words.push_back(word);
      continue;
    }
    std::string quoted = "'";
    for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    words.push_back(quoted + "'");
  }
  return join(words, " ");
}

std::string dry_run_text(const LaunchPlan& plan, const std::vector<PlannedProcess>& processes) {
  std::string out;
  for (const Setting& setting : plan.settings) {
    out += str(setting.name, " = ", setting.value, "  (", name_of(setting.source),
               setting.origin.empty() ? "" : " ", setting.origin, ")\n");
  }
  out += str("\n", explanation(plan), "\n");
  for (const auto& process : processes) {
    out += str("\n", title(process), ": ", shell_line(process.argv), "\n");
    for (const auto& [name, value] : process.variables) {
      const bool free_port = name == "MASTER_PORT" && value == "0";
      out += str("  ", name, "=", value, free_port ? "  (a free one is taken)" : "", "\n");
    }
  }
  return out;
}

std::string dry_run_json(const LaunchPlan& plan, const std::vector<PlannedProcess>& processes) {
  Value::Dict settings;
  for (const Setting& setting : plan.settings) {
    settings.set(setting.name,
                 Value::Dict{{"value", setting.value},
                             {"source", name_of(setting.source)},
                             {"from", setting.origin.empty() ? Value() : Value(setting.origin)}});
  }
  Value::List list;
  for (const auto& process : processes) list.push_back(process_value(process));
  Value::Dict dict;
  dict.set("mode", name_of(plan.mode));
  dict.set("settings", std::move(settings));
  dict.set("command", plan.argv);
  dict.set("variables", map_value(plan.variables));
  dict.set("agent", plan.mode == LaunchMode::kAgent ? agent_value(plan.agent) : Value());
  dict.set("processes", std::move(list));
  dict.set("warnings", plan.warnings);
  return json_dumps(dict, {.indent = 2}) + "\n";
}

}  // namespace accelerate::detail::launch
