// Folders of torch.distributed.checkpoint that we write: our reader gets everything back. That
// Python loads them is seen by `make interop`.
#include "formats/dcp_writer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <numeric>

#include "accelerate/errors.h"
#include "core/files.h"
#include "formats/merge_weights.h"
#include "formats/safetensors_header.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate::detail::formats {
namespace {

using test::message_of;
using Numbers = std::vector<std::int64_t>;

constexpr const TorchDtype& kFloat32 = kTorchDtypes[1];

std::string bytes_of(FlatRange range) {
  std::vector<float> numbers(static_cast<std::size_t>(range.count()));
  std::iota(numbers.begin(), numbers.end(), static_cast<float>(range.begin));
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float)};
}

/// One process of several that write counted tensors in equal parts.
class Writer {
 public:
  Writer(const test::Folder& folder, int rank)
      : file_(folder / dcp_file_name(rank)),
        writer(dcp_file_name(rank), [this](std::string_view bytes) { file_ << bytes; }) {}

  void add(const Value::List& path, const Numbers& sizes, FlatRange range) {
    writer.begin_tensor(path, kFloat32, sizes);
    for (const auto& box : flat_range_to_boxes(sizes, range)) {
      const auto count = element_count(box.sizes);
      writer.add_chunk(box, bytes_of({range.begin, range.begin + count}));
      range.begin += count;
    }
  }

 private:
  std::ofstream file_;

 public:
  DcpFileWriter writer;
};

TEST(DcpWriter, WritesWhatTheReaderReadsForAnyNumberOfProcesses) {
  for (const int world : {1, 2, 3, 4, 7}) {
    const test::Folder folder;
    const std::map<std::string, Numbers> shapes{{"matrix", {5, 3}},
                                                {"deep", {2, 3, 4}},
                                                {"vector", {7}},
                                                {"scalar", {}},
                                                {"empty", {0, 2}}};
    std::vector<std::vector<DcpEntry>> parts;
    for (int rank = 0; rank < world; ++rank) {
      Writer one(folder, rank);
      for (const auto& [name, sizes] : shapes) {
        const auto count = element_count(sizes);
        const auto part = (count + world - 1) / world;
        const auto at = [&](int index) { return std::min(count, index * part); };
        one.add({"model", name}, sizes, {at(rank), at(rank + 1)});
      }
      if (rank == 0) one.writer.add_value({"model", "extra", 1}, Value::tuple({3, "text"}));
      if (rank == 0) one.writer.add_value({"model", "extra", 0}, Value());
      parts.push_back(dcp_entries_from(dcp_entries_to_value(one.writer.entries())));
    }
    std::ofstream(folder / ".metadata") << dcp_metadata(parts, folder.path());

    DcpReader reader(folder.path());
    EXPECT_EQ(reader.entries().size(), shapes.size() + 2);
    for (const auto& entry : reader.entries()) {
      if (entry.dtype == nullptr) continue;
      const auto& sizes = shapes.at(reader.path_of(entry)[0].as_string());
      EXPECT_EQ(entry.sizes, sizes);
      const auto count = element_count(sizes);
      EXPECT_EQ(reader.read_tensor(entry), bytes_of({0, count}));
      for (std::int64_t begin = 0; begin < count; ++begin) {
        const FlatRange range{begin, std::min<std::int64_t>(count, begin + 5)};
        std::string part(static_cast<std::size_t>(range.count()) * 4, '\0');
        reader.read_range(entry, range, part);
        EXPECT_EQ(part, bytes_of(range)) << entry.name << " from " << begin;
      }
    }
    const auto tree = reader.nested([&](const DcpEntry& entry) {
      return entry.dtype == nullptr ? reader.read_value(entry) : Value(entry.name);
    });
    EXPECT_EQ(tree.at("extra").repr(), "[None, (3, 'text')]");
    EXPECT_EQ(tree.at("deep").as_string(), "model.deep");
  }
}

TEST(DcpReader, ReadsRangesOfWhatPythonHasShardedAlongAnyDimension) {
  DcpReader reader(test::reference_path("dcp/model"));
  for (const auto& entry : reader.entries()) {
    const auto whole = reader.read_tensor(entry);
    const auto count = element_count(entry.sizes);
    const auto item = static_cast<std::size_t>(entry.dtype->bytes);
    for (std::int64_t begin = 0; begin < count; ++begin) {
      for (std::int64_t end = begin; end <= count; ++end) {
        std::string part(static_cast<std::size_t>(end - begin) * item, '\0');
        reader.read_range(entry, {begin, end}, part);
        ASSERT_EQ(part, whole.substr(static_cast<std::size_t>(begin) * item, part.size()))
            << entry.name;
      }
    }
  }
}

TEST(DcpWriter, WritesRunsThatAreReadStraightIntoPlace) {
  const test::Folder folder;
  const Numbers sizes{3, 100'000};
  std::vector<std::vector<DcpEntry>> parts;
  {
    Writer one(folder, 0);
    one.add({"model", "large"}, sizes, {0, 300'000});
    parts.push_back(one.writer.entries());
  }
  std::ofstream(folder / ".metadata") << dcp_metadata(parts, "here");
  DcpReader reader(folder.path());
  std::string part(std::size_t{200'000} * 4, '\0');
  reader.read_range(reader.entries()[0], {50'000, 250'000}, part);
  EXPECT_EQ(part, bytes_of({50'000, 250'000}));
}

TEST(DcpLeaves, AreThoseOfPython) {
  const Value state = Value::Dict{
      {"state", Value::Dict{{"a.b", Value::Dict{{"step", 3}, {"none", nullptr}}}, {7, 1.5}}},
      {"param_groups", Value::List{Value::Dict{{"lr", 0.1},
                                               {"betas", Value::tuple({0.9, 0.999})},
                                               {"params", Value::List{"a.b", "c"}}}}},
      {"empty", Value::Dict{}},
      {"lists", Value::List{Value::list({1, 2}), Value::list({})}},
      {"deep", Value::List{1, Value::List{Value::Dict{{"x", 2}}}}}};
  std::vector<std::string> found;
  for_each_dcp_leaf(state, {"root"}, [&](const Value::List& path, const Value& leaf) {
    found.push_back(Value(path).repr() + " " + leaf.repr());
  });
  // As Python's flatten_state_dict gives them.
  EXPECT_EQ(
      found,
      (std::vector<std::string>{
          "['root', 'state', 'a.b', 'step'] 3", "['root', 'state', 'a.b', 'none'] None",
          "['root', 'state', '7'] 1.5", "['root', 'param_groups', 0, 'lr'] 0.1",
          "['root', 'param_groups', 0, 'betas'] (0.9, 0.999)",
          "['root', 'param_groups', 0, 'params'] ['a.b', 'c']", "['root', 'lists'] [[1, 2], []]",
          "['root', 'deep', 0] 1", "['root', 'deep', 1, 0, 'x'] 2"}));
}

std::string error_of(const std::vector<std::vector<DcpEntry>>& parts) {
  return message_of<CheckpointError>([&] { (void)dcp_metadata(parts, "here"); });
}

DcpEntry tensor(const Numbers& sizes, std::vector<DcpChunk> chunks) {
  return {
      .name = "w", .path = {"w"}, .dtype = &kFloat32, .sizes = sizes, .chunks = std::move(chunks)};
}

DcpChunk chunk(std::int64_t begin, std::int64_t count, const std::string& file) {
  return {{.offsets = {begin}, .sizes = {count}}, {.file = file, .offset = 0, .length = 1000}};
}

TEST(DcpWriter, RefusesWhatProcessesDoNotAgreeAbout) {
  EXPECT_EQ(error_of({{tensor({4}, {chunk(0, 2, "a")})}, {tensor({5}, {chunk(2, 2, "b")})}}),
            "'w' is (4) of torch.float32 on rank 0 and (5) of torch.float32 on rank 1. All "
            "processes must save the same model.");
  const DcpEntry value{.name = "v", .path = {"v"}};
  EXPECT_EQ(error_of({{value}, {}, {value}}), "The value 'v' is saved by rank 0 and by rank 2.");
}

TEST(DcpWriter, RefusesPartsThatDoNotMakeAWhole) {
  const std::string begin =
      "What the processes have saved does not fit together: 'here', byte 0: the metadata of the "
      "checkpoint: ";
  EXPECT_EQ(error_of({{tensor({4}, {chunk(0, 2, "a")})}, {tensor({4}, {chunk(2, 1, "b")})}}),
            begin + "the chunks of 'w' have 12 of its 16 bytes.");
  EXPECT_EQ(error_of({{tensor({4}, {chunk(0, 3, "a")})}, {tensor({4}, {chunk(2, 2, "b")})}}),
            begin + "two chunks of 'w' overlap at (2).");
}

TEST(MergeWeights, MergesWhatWeHaveWritten) {
  const test::Folder folder;
  std::vector<std::vector<DcpEntry>> parts;
  for (int rank = 0; rank < 3; ++rank) {
    Writer one(folder, rank);
    one.add({"model", "a.weight"}, {4, 3}, {rank * 4, rank * 4 + 4});
    parts.push_back(one.writer.entries());
  }
  std::ofstream(folder / ".metadata") << dcp_metadata(parts, folder.path());
  const auto path = merge_weights(folder.path(), folder.path() / "out", {});
  const auto bytes = read_whole_file(path);
  const auto header = read_safetensors_header(bytes, "merged");
  ASSERT_EQ(header.tensors.size(), 1U);
  EXPECT_EQ(header.tensors[0].name, "a.weight");
  EXPECT_EQ(bytes.substr(static_cast<std::size_t>(header.data_offset)), bytes_of({0, 12}));
}

TEST(MergeWeights, MergesFoldersOfDeepSpeed) {
  const test::Folder folder;
  for (const auto* name : {"zero/stage2_3", "zero/stage3_4"}) {
    const auto path = merge_weights(test::reference_path(name), folder.path() / name, {});
    const auto bytes = read_whole_file(path);
    const auto header = read_safetensors_header(bytes, "merged");
    EXPECT_EQ(header.tensors.size(), 8U);
    const auto* weight = header.find("first.weight");
    ASSERT_NE(weight, nullptr);
    EXPECT_EQ(weight->shape, (Numbers{5, 3}));
    EXPECT_EQ(bytes.substr(static_cast<std::size_t>(header.data_offset + weight->begin), 60),
              bytes_of({0, 15}));
    (void)merge_weights(test::reference_path(name), folder.path() / name,
                        {.safe_serialization = false});
    EXPECT_TRUE(std::filesystem::exists(folder.path() / name / "pytorch_model.bin"));
  }
}

}  // namespace
}  // namespace accelerate::detail::formats
