#include "core/config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "accelerate/errors.h"
#include "captured_log.h"
#include "core/files.h"
#include "core/yaml.h"
#include "reference.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::CapturedLog;
using test::message_of;
using test::read_file;
using test::reference_path;

// A folder of its own for each test.
class ConfigFile : public testing::Test {
 protected:
  ConfigFile() {
    std::string name = (fs::temp_directory_path() / "accelerate_config_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~ConfigFile() override { fs::remove_all(folder_); }

  fs::path file(const std::string& name) const { return folder_ / name; }

  fs::path write(const std::string& name, const std::string& text) const {
    detail::write_file_atomically(file(name), text);
    return file(name);
  }

  // The message of loading a file with this text, without the path.
  std::string problem(const std::string& text, const std::string& name = "a.yaml") const {
    const auto path = write(name, text);
    auto message = message_of<ConfigError>([&] { (void)load_config_from_file(path); });
    const auto at = message.find(path.string());
    if (at != std::string::npos) message.replace(at, path.string().size(), "FILE");
    return message;
  }

  ClusterConfig load(const std::string& text) const {
    return std::get<ClusterConfig>(load_config_from_file(write("a.yaml", text)));
  }

  fs::path folder_;
};

void rewrite(const Config& config, const fs::path& path, bool json) {
  std::visit([&](const auto& c) { json ? c.to_json_file(path) : c.to_yaml_file(path); }, config);
}

TEST_F(ConfigFile, WrittenByPythonIsWrittenAgainByteForByte) {
  const CapturedLog log;  // one of the files has sections with odd keys
  int count = 0;
  for (const auto& entry : fs::directory_iterator(reference_path("config/written"))) {
    const auto before = read_file(entry.path());
    const bool json = before.starts_with("{");
    const auto again = file("again" + entry.path().extension().string());
    rewrite(load_config_from_file(entry.path()), again, json);
    EXPECT_EQ(read_file(again), before) << entry.path();
    ++count;
  }
  EXPECT_GE(count, 30);
}

TEST_F(ConfigFile, InTheDocumentsHasEveryKeyAndNoOther) {
  const CapturedLog log;
  const auto path = reference_path("../../docs/accelerate_config.yaml");
  const auto config = std::get<ClusterConfig>(load_config_from_file(path));
  EXPECT_EQ(log.messages(), std::vector<std::string>{}) << "a section has keys that are not known";
  const auto text = read_file(path);
  const auto expect_key = [&](const std::string& key) {
    EXPECT_NE(text.find(key), std::string::npos) << key;
  };
  const auto expect_field = [&](const auto& field) {
    expect_key("\n" + std::string(field.name) + ":");
    for (const auto& key : detail::known_section_keys(field.name)) expect_key(" " + key);
  };
  std::apply([&](const auto&... fields) { (expect_field(fields), ...); },
             value_fields(std::type_identity<ClusterConfig>{}));
  EXPECT_EQ(config.distributed_type, DistributedType::kMultiCpu);
  EXPECT_EQ(config.num_processes, 2);
}

TEST_F(ConfigFile, OfAnOlderVersionBecomesWhatPythonMakesOfIt) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(reference_path("config/legacy"))) {
    if (entry.path().string().ends_with(".expected.yaml")) continue;
    rewrite(load_config_from_file(entry.path()), file("again.yaml"), /*json=*/false);
    auto expected = entry.path();
    expected.replace_extension(".expected.yaml");
    EXPECT_EQ(read_file(file("again.yaml")), read_file(expected)) << entry.path();
    ++count;
  }
  EXPECT_GE(count, 9);
}

TEST_F(ConfigFile, GivesItsValuesAsMembers) {
  const auto config = std::get<ClusterConfig>(
      load_config_from_file(reference_path("config/written/two_nodes.yaml")));
  EXPECT_EQ(config.distributed_type, DistributedType::kMultiGpu);
  EXPECT_EQ(config.mixed_precision, PrecisionType::kBf16);
  EXPECT_EQ(config.num_processes, 16);
  EXPECT_EQ(config.num_machines, 2);
  EXPECT_EQ(config.main_process_ip, "node-1.cluster");
  EXPECT_EQ(config.main_process_port, 29501);
  EXPECT_EQ(config.same_network, false);
  EXPECT_EQ(config.rdzv_backend, "c10d");
  EXPECT_EQ(config.downcast_bf16, "no");
  EXPECT_EQ(config.tpu_env, std::vector<std::string>{});
  EXPECT_TRUE(config.fsdp_config.empty());
}

TEST_F(ConfigFile, ForSageMakerGivesASageMakerConfig) {
  const auto config = std::get<SageMakerConfig>(
      load_config_from_file(reference_path("config/written/sagemaker.yaml")));
  EXPECT_EQ(config.distributed_type, SageMakerDistributedType::kDataParallel);
  EXPECT_EQ(config.region, "eu-west-1");
  EXPECT_EQ(Value(config.additional_args).repr(), "{'max_run': 3600}");
  EXPECT_EQ(problem("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n"
                    "iam_role_name: x\n"),
            "The config file at FILE is for Amazon SageMaker and must have a `ec2_instance_type`.");
}

TEST_F(ConfigFile, FillsWhatIsNotSaidWithPythonsDefaults) {
  const auto config = load("distributed_type: MULTI_GPU\n");
  ClusterConfig defaults;
  defaults.distributed_type = DistributedType::kMultiGpu;
  EXPECT_EQ(config, defaults);
  EXPECT_EQ(config.num_processes, -1);
  EXPECT_EQ(load("distributed_type: 'NO'\n").num_processes, 1);
}

TEST_F(ConfigFile, TakesUnquotedNoForTheWord) {
  const auto config = load("distributed_type: NO\nmixed_precision: no\n");
  EXPECT_EQ(config.distributed_type, DistributedType::kNo);
  EXPECT_EQ(config.mixed_precision, PrecisionType::kNo);
}

TEST_F(ConfigFile, TakesNumbersAndTextsAsPeopleWriteThem) {
  const auto config = load(
      "distributed_type: TPU\ngpu_ids: 0\nnum_processes: 1e2\nmain_process_port: '29500'\n"
      "use_cpu: 'yes'\ndebug: 0\nmixed_precision: BF16\ncommands: ls\n");
  EXPECT_EQ(config.distributed_type, DistributedType::kXla);
  EXPECT_EQ(config.gpu_ids, "0");
  EXPECT_EQ(config.num_processes, 100);
  EXPECT_EQ(config.main_process_port, 29500);
  EXPECT_TRUE(config.use_cpu);
  EXPECT_FALSE(config.debug);
  EXPECT_EQ(config.mixed_precision, PrecisionType::kBf16);
  EXPECT_EQ(config.commands, std::vector<std::string>{"ls"});
}

TEST_F(ConfigFile, RefusesValuesOfTheWrongKindNamingFileKeyAndValue) {
  EXPECT_EQ(problem("distributed_type: NO\nnum_processes: four\n"),
            "The config file at FILE: 'num_processes' is 'four', expected a whole number.");
  EXPECT_EQ(problem("distributed_type: NO\nnum_processes: 2.5\n"),
            "The config file at FILE: 'num_processes' is 2.5, expected a whole number.");
  EXPECT_EQ(problem("distributed_type: NO\nuse_cpu: maybe\n"),
            "The config file at FILE: 'use_cpu' is 'maybe', expected true or false.");
  EXPECT_EQ(problem("distributed_type: NO\nmain_process_ip: yes\n"),
            "The config file at FILE: 'main_process_ip' is True, expected a text; put it into "
            "quotes.");
  EXPECT_EQ(
      problem("distributed_type: NO\nfsdp_config: 3\n"),
      "The config file at FILE: 'fsdp_config' is 3, expected a section with keys and values.");
  EXPECT_EQ(problem("distributed_type: NO\ncommands: 3\n"),
            "The config file at FILE: 'commands' is 3, expected a list of texts.");
  EXPECT_EQ(problem("distributed_type: 3\n")
                .find("The config file at FILE: 'distributed_type' is "
                      "3, expected one of: NO, MULTI_CPU"),
            0U);
  EXPECT_NE(problem("distributed_type: MULTI_GPUS\n").find("MULTI_GPU"), std::string::npos);
}

TEST_F(ConfigFile, ListsUnknownKeysSorted) {
  EXPECT_EQ(problem("distributed_type: NO\nzeta: 1\nalpha: 2\n"),
            "The config file at FILE has unknown keys (['alpha', 'zeta']). Upgrade accelerate, or "
            "fix or remove these keys.");
  EXPECT_EQ(problem("distributed_type: NO\nnum_proceses: 1\n"),
            "The config file at FILE has unknown keys (['num_proceses']). Upgrade accelerate, or "
            "fix or remove these keys. Near to them: num_processes.");
}

TEST_F(ConfigFile, WarnsOfUnknownKeysInSectionsAndKeepsThem) {
  const CapturedLog log;
  const auto config = load(
      "distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2\n  version: 2\n"
      "  something_else_entirely: 1\nfp8_config: {backend: TE, fp8_format: E4M3}\n");
  const auto where = "The config file at " + file("a.yaml").string();
  EXPECT_EQ(log.messages(),
            (std::vector<std::string>{
                where + ": 'fsdp_versoin' in fsdp_config is not known and has no effect. Did you "
                        "mean 'fsdp_version'?",
                where + ": 'something_else_entirely' in fsdp_config is not known and has no "
                        "effect."}));
  EXPECT_EQ(config.fsdp_config.at("fsdp_versoin"), 2);
}

TEST_F(ConfigFile, DropsRetiredSectionsWithAWarning) {
  const CapturedLog log;
  (void)load("distributed_type: NO\nipex_config: {ipex: true}\ntp_config: {}\n");
  const auto where = "The config file at " + file("a.yaml").string();
  EXPECT_EQ(log.messages(),
            (std::vector<std::string>{
                where + ": 'ipex_config' is of an older version and no longer has an effect.",
                where + ": 'tp_config' is of an older version and no longer has an effect."}));
}

TEST_F(ConfigFile, ThatIsMissingEmptyOrNoMappingIsRefused) {
  const auto missing = file("none.yaml").string();
  EXPECT_EQ(message_of<ConfigError>([&] { (void)load_config_from_file(missing); }),
            "The config file at " + missing +
                " does not exist. Pass an existing file, or make one with `accelerate config`.");
  EXPECT_EQ(problem(""), "The config file at FILE is empty.");
  EXPECT_EQ(problem("# nothing\n"), "The config file at FILE is empty.");
  EXPECT_EQ(problem("- a\n"), "The config file at FILE must hold keys and values, not a list.");
  EXPECT_EQ(problem("num_processes: 2\n"),
            "The config file at FILE must have a `distributed_type`.");
  EXPECT_EQ(problem("a: [1\n"),
            "The config file at FILE, line 2, column 1: while parsing a flow sequence, did not "
            "find expected ',' or ']'.");
  EXPECT_EQ(problem("{\"a\": }", "a.json"),
            "The config file at FILE, line 1, column 7: expected a value.");
  EXPECT_EQ(message_of<ConfigError>([&] { (void)load_config_from_file(folder_); }),
            "Cannot read '" + folder_.string() + "': Is a directory.");
}

TEST_F(ConfigFile, IsReplacedWholeAndKeepsItsPermissions) {
  const auto path = write("a.yaml", "old");
  ::chmod(path.c_str(), 0600);
  ClusterConfig{}.to_yaml_file(path);
  EXPECT_TRUE(read_file(path).starts_with("compute_environment: LOCAL_MACHINE\n"));
  struct stat info{};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  // Nothing is left of the temporary file.
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}), 1);
}

TEST_F(ConfigFile, BehindALinkIsReplacedWhereItIs) {
  const auto target = write("target.yaml", "old");
  fs::create_symlink(target, file("link.yaml"));
  ClusterConfig{}.to_yaml_file(file("link.yaml"));
  EXPECT_TRUE(fs::is_symlink(file("link.yaml")));
  EXPECT_NE(read_file(target), "old");
}

TEST_F(ConfigFile, ThatCannotBeWrittenIsAnErrorWithTheReason) {
  const auto path = file("no_folder/a.yaml");
  EXPECT_EQ(message_of<ConfigError>([&] { ClusterConfig{}.to_yaml_file(path); }),
            "Cannot write '" + path.string() + "': No such file or directory.");
}

TEST_F(ConfigFile, HasADefaultPlaceByHfHomeThenXdgThenHome) {
  using detail::default_config_file;
  const auto path = [](std::map<std::string, std::string> variables) {
    variables.emplace("HOME", "/home/me");
    return default_config_file(Environment(std::move(variables))).string();
  };
  EXPECT_EQ(path({{"HF_HOME", "/hf"}, {"XDG_CACHE_HOME", "/xdg"}}),
            "/hf/accelerate/default_config.yaml");
  EXPECT_EQ(path({{"HF_HOME", ""}, {"XDG_CACHE_HOME", "/xdg"}}),
            "/xdg/huggingface/accelerate/default_config.yaml");
  EXPECT_EQ(path({}), "/home/me/.cache/huggingface/accelerate/default_config.yaml");
  EXPECT_EQ(path({{"HF_HOME", "~/hf"}, {"X", "y"}}), "/home/me/hf/accelerate/default_config.yaml");
}

TEST_F(ConfigFile, BasicIsWhatPythonWritesForTheSameMachine) {
  const auto write_basic = [&](const std::string& precision, int count) {
    const auto path = file("made/here/" + precision + std::to_string(count) + ".yaml");
    EXPECT_EQ(detail::write_basic_config(precision, path, DistributedType::kMultiGpu, count), path);
    return read_file(path);
  };
  EXPECT_EQ(write_basic("no", 0), read_file(reference_path("config/written/basic_no.yaml")));
  EXPECT_EQ(write_basic("BF16", 0), read_file(reference_path("config/written/basic_bf16.yaml")));
  EXPECT_EQ(write_basic("fp16", 4),
            read_file(reference_path("config/written/basic_four_gpus.yaml")));
  const auto one = detail::basic_config("fp8", DistributedType::kMultiGpu, 1);
  EXPECT_EQ(one.distributed_type, DistributedType::kNo);
  EXPECT_EQ(one.num_processes, 1);
  EXPECT_FALSE(one.use_cpu);
}

TEST_F(ConfigFile, MayBeginWithAByteOrderMark) {
  const auto read = [&](const std::string& name, const std::string& text) {
    return std::get<ClusterConfig>(load_config_from_file(write(name, "\xEF\xBB\xBF" + text)));
  };
  EXPECT_EQ(read("a.yaml", "distributed_type: 'NO'\nnum_processes: 3\n").num_processes, 3);
  EXPECT_EQ(read("a.json", R"({"distributed_type": "NO", "num_processes": 3})").num_processes, 3);
}

TEST_F(ConfigFile, MayNotHaveAKeyTwice) {
  EXPECT_EQ(problem("distributed_type: 'NO'\nnum_processes: 2\nnum_processes: 3\n"),
            "The config file at FILE, line 3, column 1: the key 'num_processes' is here a second "
            "time.");
  EXPECT_EQ(problem("distributed_type: 'NO'\nfsdp_config:\n  a: 1\n  a: 1\n"),
            "The config file at FILE, line 4, column 3: the key 'a' is here a second time.");
  const auto json = write("a.json",
                          "{\"distributed_type\": \"NO\",\n \"debug\": true,\n"
                          " \"debug\": false}");
  EXPECT_EQ(message_of<ConfigError>([&] { (void)load_config_from_file(json); }),
            "The config file at " + json.string() +
                ", line 3, column 2: the key 'debug' is here a second time.");
}

TEST_F(ConfigFile, ThatIsAPipeIsNotWaitedFor) {
  const auto pipe = file("pipe.yaml");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(message_of<ConfigError>([&] { (void)load_config_from_file(pipe); }),
            "The config file at " + pipe.string() + " is a pipe or a device. Pass a regular file.");
}

TEST_F(ConfigFile, BasicLeavesAnExistingFileAlone) {
  const CapturedLog log;
  const auto path = write("a.yaml", "mine");
  EXPECT_EQ(detail::write_basic_config("no", path, DistributedType::kMultiGpu, 0), std::nullopt);
  EXPECT_EQ(read_file(path), "mine");
  EXPECT_EQ(log.messages(),
            (std::vector<std::string>{"There is a configuration at " + path.string() +
                                      " already; it is left alone. Edit or remove it, or give "
                                      "another place."}));
}

TEST_F(ConfigFile, BasicRefusesAnUnknownPrecision) {
  EXPECT_EQ(message_of<ArgumentError>(
                [] { (void)detail::basic_config("fp32", DistributedType::kMultiGpu, 1); }),
            "`mixed_precision` should be one of 'no', 'fp16', 'bf16' or 'fp8', not 'fp32'.");
}

}  // namespace
}  // namespace accelerate
