// MLflow: runs in a folder, as its FileStore keeps them, or on a server, by its REST interface.
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <system_error>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/files.h"
#include "core/json.h"
#include "core/log.h"
#include "core/python_text.h"
#include "core/text.h"
#include "core/yaml.h"
#include "tracking/http.h"
#include "tracking/tracker_files.h"
#include "tracking/trackers.h"

namespace accelerate::detail::tracking {
namespace {

namespace fs = std::filesystem;
using TextPairs = std::vector<std::pair<std::string, std::string>>;

struct MlflowMetric {
  std::string key;
  double value = 0;
  std::int64_t timestamp = 0;  ///< milliseconds since 1970
  std::int64_t step = 0;
};

/// How many characters of UTF-8.
std::ptrdiff_t length_of(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
}

/// Throws `ArgumentError` for a name that MLflow refuses.
void check_metric_name(const std::string& key) {
  constexpr std::ptrdiff_t kLongestName = 250;
  const bool plain = std::ranges::all_of(key, [](unsigned char c) {
    return std::isalnum(c) != 0 || c >= 0x80 ||
           std::string_view("_./- :").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain && is_file_name(key) && length_of(key) <= kLongestName) return;
  throw ArgumentError(str("Names have at most ", kLongestName,
                          " letters, digits, blanks and _ . / - : only, and the parts between '/' "
                          "are not empty, '.' or '..'."));
}

/// What both kinds of stores share: which run it is, and what is logged.
class MlflowTracker : public BuiltinTracker {
 public:
  explicit MlflowTracker(const TrackerArguments& arguments) : BuiltinTracker("mlflow") {
    const auto& kwargs = arguments.kwargs;
    const auto environment = Environment::process();
    check_kwargs(name(), kwargs,
                 {"logging_dir", "run_id", "tags", "nested_run", "run_name", "description"});
    // Variables go before settings, as in Python.
    experiment_ = environment.get("MLFLOW_EXPERIMENT_NAME").value_or(arguments.project_name);
    artifact_location_ = text_in(kwargs, "logging_dir");
    run_id_ = environment.get("MLFLOW_RUN_ID").value_or(text_in(kwargs, "run_id").value_or(""));
    // A run is nested in the active run of its process, and here there is no other one.
    static_cast<void>(environment.flag("MLFLOW_NESTED_RUN"));
    Value tags = kwargs.get("tags", Value::Dict{});
    if (const auto text = environment.get("MLFLOW_TAGS")) tags = *text;
    if (tags.is_string()) tags = json_loads(tags.as_string(), "The tags of the tracker mlflow");
    for (const auto& [key, value] : tags.as_dict()) {
      experiment_tags_.emplace_back(key.to_string(), python_str(value));
    }
    tags_ = experiment_tags_;
    if (const auto text = text_in(kwargs, "description")) {
      tags_.emplace_back("mlflow.note.content", *text);
    }
    if (!run_id_.empty()) return;
    user_ = environment.get("USER").value_or(environment.get("LOGNAME").value_or("unknown"));
    run_name_ = text_in(kwargs, "run_name").value_or("run-" + random_text(8));
    tags_.emplace_back("mlflow.runName", run_name_);
    tags_.emplace_back("mlflow.user", user_);
    tags_.emplace_back("mlflow.source.name", program_invocation_short_name);
    tags_.emplace_back("mlflow.source.type", "LOCAL");
  }

  void store_init_configuration(const Value::Dict& values) override {
    constexpr std::ptrdiff_t kLongestParam = 6000;
    TextPairs params;
    for (const auto& [key, value] : values) {
      auto text = python_str(value);
      const auto length = length_of(text);
      if (length <= kLongestParam) {
        params.emplace_back(key.to_string(), std::move(text));
        continue;
      }
      warn_once(str("The tracker mlflow leaves out the parameter '", key.to_string(),
                    "': it takes ", kLongestParam, " characters, and this one has ", length, "."));
    }
    log_params(params);
  }

  void log(const Value::Dict& values, std::optional<std::int64_t> step,
           const Value::Dict& kwargs) override {
    check_kwargs(name(), kwargs, {});
    const auto now = now_milliseconds();
    for (const auto& [given, value] : values) {
      const auto key = given.to_string();
      try_value(key, [&] {
        const auto number = number_of(value);
        if (!number) refuse_value(value, "a number");
        check_metric_name(key);
        log_metric({key, *number, now, step.value_or(0)});
      });
    }
  }

 protected:
  virtual void log_params(const TextPairs& params) = 0;
  virtual void log_metric(const MlflowMetric& metric) = 0;

  std::string experiment_;
  /// For artifacts of an experiment that is made; nullopt: below the store.
  std::optional<std::string> artifact_location_;
  std::string run_id_;  ///< empty: a new run
  std::string run_name_;
  std::string user_;
  TextPairs experiment_tags_;
  TextPairs tags_;
};

std::string file_uri(const fs::path& path) {
  return "file://" + percent_encoded(fs::absolute(path).lexically_normal().string(), "-._~/");
}

/// The content of a meta.yaml; nothing where there is none that can be read, as in MLflow.
std::optional<Value::Dict> read_meta(const fs::path& folder) {
  try {
    return yaml_loads(read_whole_file(folder / "meta.yaml")).as_dict();
  } catch (const Error&) {
    return std::nullopt;
  }
}

class MlflowFolder final : public MlflowTracker {
 public:
  MlflowFolder(const TrackerArguments& arguments, fs::path root)
      : MlflowTracker(arguments), root_(std::move(root)) {}

  void start() override {
    std::error_code error;
    if (!fs::exists(root_, error)) make_experiment("0", "Default", {}, file_uri(root_ / "0"));
    make_folder(root_ / ".trash");
    if (run_id_.empty()) {
      create(find_experiment());
    } else {
      find_run();
    }
    meta_.set("status", kRunning);
    meta_.set("end_time", nullptr);
    replace_file(folder_ / "meta.yaml", yaml_dumps(meta_));
    for (const char* kind : {"metrics", "params", "artifacts"}) make_folder(folder_ / kind);
    for (const auto& [key, value] : tags_) replace_file(inside(folder_ / "tags", key), value);
    handle_ = run_id_;
  }

  void finish() override {
    meta_.set("status", kFinished);
    meta_.set("end_time", now_milliseconds());
    replace(folder_ / "meta.yaml", yaml_dumps(meta_));
    MlflowTracker::finish();
  }

 protected:
  void log_params(const TextPairs& params) override {
    for (const auto& [key, value] : params) replace_file(inside(folder_ / "params", key), value);
  }
  void log_metric(const MlflowMetric& metric) override {
    append(inside(folder_ / "metrics", metric.key),
           str(metric.timestamp, " ", python_repr(metric.value), " ", metric.step, "\n"));
  }

 private:
  // Of MLflow's RunStatus and SourceType.
  static constexpr int kRunning = 1;
  static constexpr int kFinished = 3;
  static constexpr int kLocal = 4;

  void make_experiment(const std::string& id, const std::string& name, const TextPairs& tags,
                       const std::string& artifacts) const {
    for (const auto& [key, value] : tags) replace_file(inside(root_ / id / "tags", key), value);
    const auto now = now_milliseconds();
    const Value::Dict meta{
        {"artifact_location", artifacts}, {"creation_time", now},        {"experiment_id", id},
        {"last_update_time", now},        {"lifecycle_stage", "active"}, {"name", name}};
    replace_file(root_ / id / "meta.yaml", yaml_dumps(meta));
  }

  [[nodiscard]] fs::path find_experiment() const {
    for (const auto& entry : fs::directory_iterator(root_)) {
      const auto meta = read_meta(entry.path());
      if (meta && meta->get("name", "") == Value(experiment_) &&
          meta->get("lifecycle_stage", "active") == Value("active")) {
        return entry.path();
      }
    }
    const auto id = "1" + random_text(17, "0123456789");
    make_experiment(id, experiment_, experiment_tags_,
                    artifact_location_.value_or(file_uri(root_ / id)));
    return root_ / id;
  }

  void create(const fs::path& experiment) {
    run_id_ = random_text(32);
    folder_ = experiment / run_id_;
    const auto artifacts = read_meta(experiment).value().at("artifact_location").as_string();
    meta_ = {{"artifact_uri", str(artifacts, "/", run_id_, "/artifacts")},
             {"entry_point_name", ""},
             {"experiment_id", experiment.filename().string()},
             {"lifecycle_stage", "active"},
             {"run_id", run_id_},
             {"run_name", run_name_},
             {"source_name", ""},
             {"source_type", kLocal},
             {"source_version", ""},
             {"start_time", now_milliseconds()},
             {"tags", Value::List{}},
             {"user_id", user_}};
  }

  void find_run() {
    for (const auto& entry : fs::directory_iterator(root_)) {
      folder_ = inside(entry.path(), run_id_);
      const auto meta = read_meta(folder_);
      if (!meta) continue;
      meta_ = *meta;
      return;
    }
    throw ConfigError(str("The tracker mlflow shall go on with the run '", run_id_, "', but '",
                          root_.string(), "' has none of this id. See run_id and MLFLOW_RUN_ID."));
  }

  fs::path root_;
  fs::path folder_;  ///< of the run
  Value::Dict meta_;
};

/// As the server takes them: [{"key": ..., "value": ...}].
Value pairs(const TextPairs& texts) {
  Value::List list;
  for (const auto& [key, value] : texts)
    list.emplace_back(Value::Dict{{"key", key}, {"value", value}});
  return Value::list(std::move(list));
}

/// Metrics are sent by a thread, many in one request.
class MlflowServer final : public MlflowTracker {
 public:
  MlflowServer(const TrackerArguments& arguments, const std::string& uri)
      : MlflowTracker(arguments), server_(HttpServer::parse(uri, "MLFLOW_TRACKING_URI")) {
    const auto environment = Environment::process();
    auto login = server_.login;
    if (const auto user = environment.get("MLFLOW_TRACKING_USERNAME")) {
      login = str(*user, ":", environment.get("MLFLOW_TRACKING_PASSWORD").value_or(""));
    }
    headers_ = {"Content-Type: application/json"};
    if (const auto token = environment.get("MLFLOW_TRACKING_TOKEN"); token && login.empty()) {
      headers_.push_back("Authorization: Bearer " + *token);
    } else if (!login.empty()) {
      headers_.push_back("Authorization: Basic " + base64_encoded(login));
    }
  }

  void start() override {
    if (run_id_.empty()) {
      const auto made = post("runs/create", Value::Dict{{"experiment_id", find_experiment()},
                                                        {"user_id", user_},
                                                        {"run_name", run_name_},
                                                        {"start_time", now_milliseconds()},
                                                        {"tags", pairs(tags_)}});
      run_id_ = made.at("run").at("info").at("run_id").as_string();
    } else {
      post("runs/update", Value::Dict{{"run_id", run_id_}, {"status", "RUNNING"}});
      post("runs/log-batch", Value::Dict{{"run_id", run_id_}, {"tags", pairs(tags_)}});
    }
    handle_ = run_id_;
    requests_ = std::make_unique<Outbox>(OutboxOptions{.tracker = "mlflow", .in_background = true},
                                         [this](auto items) { return send(items); });
  }

  void finish() override {
    const Value::Dict update{
        {"run_id", run_id_}, {"status", "FINISHED"}, {"end_time", now_milliseconds()}};
    requests_->post({.target = "runs/update", .bytes = json_dumps(update)});
    requests_->finish();
  }

 protected:
  void log_params(const TextPairs& params) override {
    constexpr std::ptrdiff_t kMostParams = 100;
    for (std::ptrdiff_t at = 0; at < std::ssize(params); at += kMostParams) {
      const auto end = std::min(std::ssize(params), at + kMostParams);
      const TextPairs part(params.begin() + at, params.begin() + end);
      post("runs/log-batch", Value::Dict{{"run_id", run_id_}, {"params", pairs(part)}});
    }
  }
  void log_metric(const MlflowMetric& metric) override {
    const Value::Dict entry{{"key", metric.key},
                            {"value", metric.value},
                            {"timestamp", metric.timestamp},
                            {"step", metric.step}};
    requests_->post({.target = "metric", .bytes = json_line(entry)});
  }

 private:
  std::string find_experiment() const {
    const auto found =
        request("experiments/get-by-name?experiment_name=" + percent_encoded(experiment_));
    if (found.status == 200) {
      return json_loads(found.body).at("experiment").at("experiment_id").as_string();
    }
    if (found.status != 404) refuse("experiments/get-by-name", found);
    Value::Dict made{{"name", experiment_}, {"tags", pairs(experiment_tags_)}};
    if (artifact_location_) made.set("artifact_location", *artifact_location_);
    return post("experiments/create", made).at("experiment_id").as_string();
  }

  HttpResponse request(const std::string& what, const std::string& body = {}) const {
    return http_request(server_, "/api/2.0/mlflow/" + what, headers_, body);
  }
  Value post(const std::string& what, const Value& content) const {
    const auto response = request(what, json_line(content));
    if (response.status != 200) refuse(what, response);
    return json_loads(response.body, str("The answer to ", what));
  }

  /// Throws `ArgumentError` if the same request will always be refused.
  [[noreturn]] static void refuse(const std::string& what, const HttpResponse& response) {
    const auto message = str("MLflow answers ", what, " with HTTP ", response.status, ": ",
                             response.body.substr(0, 500));
    if (is_final(response)) throw ArgumentError(message);
    throw ConfigError(message);
  }
  /// Whether it is about the content. A login may be renewed, a server come back.
  static bool is_final(const HttpResponse& response) {
    return response.status == 400 || response.status == 413 || response.status == 422;
  }

  /// As many metrics as follow each other; fewer where one of them is refused, and with it all.
  std::size_t send(std::span<const OutboxItem> items) const {
    const bool metrics = items.front().target == "metric";
    const std::string what = metrics ? "runs/log-batch" : items.front().target;
    std::size_t count = 1;
    while (metrics && count < items.size() && items[count].target == "metric") ++count;
    for (;; count /= 2) {
      const auto response =
          request(what, metrics ? batch(items.first(count)) : items.front().bytes);
      if (response.status == 200) return count;
      if (count == 1 || !is_final(response)) refuse(what, response);
    }
  }
  std::string batch(std::span<const OutboxItem> metrics) const {
    std::string body = str(R"({"run_id": ")", run_id_, R"(", "metrics": [)");
    for (const auto& metric : metrics) body += metric.bytes + ", ";
    return body.replace(body.size() - 2, 2, "]}");
  }

  HttpServer server_;
  std::vector<std::string> headers_;
  std::unique_ptr<Outbox> requests_;
};

}  // namespace

std::shared_ptr<GeneralTracker> make_mlflow_tracker(const TrackerArguments& arguments) {
  const auto uri = Environment::process().get("MLFLOW_TRACKING_URI").value_or("mlruns");
  if (uri.starts_with("http://") || uri.starts_with("https://")) {
    return std::make_shared<MlflowServer>(arguments, uri);
  }
  if (uri.starts_with("file:")) {
    const auto path = uri.substr(uri.starts_with("file://") ? 7 : 5);
    return std::make_shared<MlflowFolder>(arguments, path);
  }
  if (uri.find("://") != std::string::npos || uri.starts_with("databricks")) {
    const auto shown = without_login(uri);
    throw UnsupportedError(str("MLFLOW_TRACKING_URI is '", shown,
                               "', which only Python's MLflow opens. Run `mlflow server "
                               "--backend-store-uri ",
                               shown, "` and set it to http://HOST:PORT, or set it to a folder."));
  }
  return std::make_shared<MlflowFolder>(arguments, uri);
}

}  // namespace accelerate::detail::tracking
