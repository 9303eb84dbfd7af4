#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>

#include "accelerate/errors.h"
#include "accelerate/tracking/summary_writer.h"
#include "core/captured_log.h"
#include "core/yaml.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"
#include "tracking/proto_reader.h"
#include "tracking/trackers.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::tracking::make_tracker;
using test::message_of;
using test::ProtoReader;

constexpr double kWalltime = 1000;

/// Records that torch.utils.tensorboard wrote.
nlohmann::json reference() {
  return nlohmann::json::parse(test::content_of(test::reference_path("tracking/events.json")));
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    text += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

/// The record of the last event in the folder.
std::string last_record(const fs::path& folder) {
  return hex(detail::tracking::event_record(test::event_bytes(test::event_file(folder)).back()));
}

TEST(EventRecords, HaveMaskedChecksums) {
  EXPECT_EQ(detail::tracking::crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(hex(detail::tracking::event_record("123456789")).substr(24),
            "313233343536373839"
            "e5b08ac7");
}

TEST(ProtoMessages, HaveTextsInUtf8) {
  using detail::tracking::ProtoMessage;
  EXPECT_EQ(ProtoReader(ProtoMessage().text(1, "gr\xC3\xBC\xFF").bytes()).text(1),
            "gr\xC3\xBC\xEF\xBF\xBD");
  EXPECT_EQ(ProtoReader(ProtoMessage().raw(1, "\xFF").bytes()).text(1), "\xFF");
}

TEST(Sha256, IsThatOfTheStandard) {
  EXPECT_EQ(detail::tracking::sha256_hex("abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(detail::tracking::sha256_hex(std::string(119, 'a')),
            "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb");
}

TEST(SummaryWriterTest, WritesTheBytesThatTorchWrites) {
  const auto expected = reference();
  const test::Folder folder;
  SummaryWriter writer(folder.path());
  writer.add_scalar("loss", 0.5, 7, kWalltime);
  EXPECT_EQ(last_record(folder.path()), expected["scalar"].get<std::string>());
  writer.add_scalar("train/loss", 0.1, std::nullopt, kWalltime);
  EXPECT_EQ(last_record(folder.path()), expected["scalar_without_step"].get<std::string>());
  writer.add_scalar("zero", 0, std::int64_t{1} << 40, kWalltime);
  EXPECT_EQ(last_record(folder.path()), expected["scalar_zero"].get<std::string>());
  writer.add_text("note", "grüß Gott", 3, kWalltime);
  EXPECT_EQ(last_record(folder.path()), expected["text"].get<std::string>());
  for (const auto& [tag, histogram] : expected["histograms"].items()) {
    writer.add_histogram(tag, histogram["values"].get<std::vector<double>>(), 2, kWalltime);
    EXPECT_EQ(last_record(folder.path()), histogram["record"].get<std::string>()) << tag;
  }
}

TEST(SummaryWriterTest, BeginsItsFileWithTheVersionAndNamesItAsTorchDoes) {
  const test::Folder folder;
  const SummaryWriter writer(folder.path(), {.filename_suffix = ".mine"});
  const auto file = test::event_file(folder.path());
  EXPECT_TRUE(std::regex_match(file.filename().string(),
                               std::regex(R"(events\.out\.tfevents\.\d{10}\..*\.\d+\.\d+\.mine)")))
      << file;
  const auto events = test::event_bytes(file);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(ProtoReader(events[0]).text(3), "brain.Event:2");
  EXPECT_GT(ProtoReader(events[0]).real(1), 1.7e9);
}

TEST(SummaryWriterTest, PurgesStepsOfACrashedRun) {
  const test::Folder folder;
  const SummaryWriter writer(folder.path(), {.purge_step = 40});
  const auto events = test::event_bytes(test::event_file(folder.path()));
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(ProtoReader(events[1]).number(2), 40U);
  EXPECT_EQ(ProtoReader(events[1]).text(3), "brain.Event:2");
  EXPECT_EQ(ProtoReader(events[2]).number(2), 40U);
  EXPECT_EQ(ProtoReader(events[2]).message(7).number(1), 1U);  // SessionLog START
}

TEST(SummaryWriterTest, StoresHyperparametersAsTorchDoes) {
  const auto all = reference();
  for (const auto& expected : all["hparams"]) {
    const test::Folder folder;
    SummaryWriter writer(folder.path());
    const auto& given = expected["value"];
    Value value = given.is_string() ? Value(given.get<std::string>()) : Value();
    if (given.is_boolean()) value = given.get<bool>();
    if (given.is_number()) value = given.get<double>();
    const auto run =
        writer.add_hparams({{expected["name"].get<std::string>(), value}, {"none", nullptr}});
    EXPECT_EQ(run.parent_path(), folder.path());
    const auto events = test::event_bytes(test::event_file(run));
    ASSERT_EQ(events.size(), 4U);
    for (std::size_t i = 0; i < 3; ++i) {
      // Record, then 9 bytes of wall time: the summary is behind them.
      const auto record = expected["records"][i].get<std::string>();
      EXPECT_EQ(hex(events[i + 1]).substr(18), record.substr(42, record.size() - 50));
    }
  }
}

TEST(SummaryWriterTest, RefusesHyperparametersThatTensorBoardCannotShow) {
  const test::Folder folder;
  SummaryWriter writer(folder.path());
  EXPECT_EQ(
      message_of<ArgumentError>([&] { writer.add_hparams({{"sizes", Value::List{1}}}); }),
      "The hyperparameter 'sizes' is a list. TensorBoard takes bools, numbers, texts and none.");
}

TEST(SummaryWriterTest, PutsEachCurveOfADictIntoARunOfItsOwn) {
  const test::Folder folder;
  SummaryWriter writer(folder.path());
  writer.add_scalars("train/loss", {{"a", 1}, {"b", 2.5}}, 3);
  writer.add_scalars("train/loss", {{"a", 0.5}}, 4);
  const auto a = test::event_bytes(test::event_file(folder / "train_loss_a"));
  ASSERT_EQ(a.size(), 3U);
  const auto value = ProtoReader(a[2]).message(5).message(1);
  EXPECT_EQ(value.text(1), "train/loss");
  EXPECT_EQ(value.real32(2), 0.5F);
  EXPECT_EQ(test::event_bytes(test::event_file(folder / "train_loss_b")).size(), 2U);
  EXPECT_NE(
      message_of<ArgumentError>([&] { writer.add_scalars("x", {{"../../up", 1}}); }).find(".."),
      std::string::npos);
}

/// The rows of a PNG file whose pixels are stored.
std::string rows_of(const std::string& png) {
  EXPECT_EQ(hex(png.substr(0, 8)), "89504e470d0a1a0a");
  const auto at = png.find("IDAT") + 4 + 2;  // behind the header of zlib
  const auto size = detail::formats::read_little<std::uint16_t>(png, at + 1);
  EXPECT_EQ(png[at], 1);
  return png.substr(at + 5, size);
}

TEST(SummaryWriterTest, ShowsImagesSideBySide) {
  const test::Folder folder;
  SummaryWriter writer(folder.path());
  std::vector<TrackerImage> images(9, {.height = 1, .width = 1, .channels = 1, .pixels = "\x07"});
  images[8].pixels = "\x09";
  writer.add_images("digits", images, 2);
  const auto image = ProtoReader(test::event_bytes(test::event_file(folder.path()))[1])
                         .message(5)
                         .message(1)
                         .message(4);
  EXPECT_EQ(image.number(1), 2U);
  EXPECT_EQ(image.number(2), 8U);
  EXPECT_EQ(image.number(3), 3U);
  const std::string first(24, '\x07');
  const auto second = std::string(3, '\x09') + std::string(21, '\0');
  EXPECT_EQ(rows_of(image.text(4)), std::string(1, '\0') + first + std::string(1, '\0') + second);
}

TEST(SummaryWriterTest, RefusesImagesThatDoNotFit) {
  const test::Folder folder;
  SummaryWriter writer(folder.path());
  const std::vector<TrackerImage> torn = {
      {.height = 2, .width = 2, .channels = 3, .pixels = "abc"}};
  EXPECT_EQ(
      message_of<ArgumentError>([&] { writer.add_images("x", torn); }),
      "The images 'x': an image of 2 x 2 pixels with 3 channels and 3 bytes. It needs 1, 3 or 4 "
      "channels, and height * width * channels bytes.");
  const std::vector<TrackerImage> mixed = {
      {.height = 1, .width = 1, .channels = 1, .pixels = "a"},
      {.height = 1, .width = 2, .channels = 1, .pixels = "ab"}};
  EXPECT_NE(message_of<ArgumentError>([&] { writer.add_images("x", mixed); }).find("1 x 2"),
            std::string::npos);
  EXPECT_NE(message_of<ArgumentError>([&] { writer.add_images("x", {}); }).find("no image"),
            std::string::npos);
}

TEST(SummaryWriterTest, SaysWhereItCannotWrite) {
  EXPECT_NE(
      message_of<ConfigError>([] { const SummaryWriter writer("/proc/no/such"); }).find("/proc/no"),
      std::string::npos);
}

TEST(TensorBoardTracker, WritesValuesByTheirKind) {
  const test::Folder folder;
  const test::CapturedLog log;
  const auto tracker =
      make_tracker("tensorboard", {.project_name = "project", .logging_dir = folder.path()});
  EXPECT_TRUE(fs::is_empty(folder.path()));  // nothing happens before the start
  tracker->start();
  tracker->store_init_configuration(
      {{"lr", 0.1}, {"deep", true}, {"none", nullptr}, {"name", "a"}});
  for (int i = 0; i < 2; ++i) {
    tracker->log({{"loss", 0.5},
                  {"ok", true},
                  {"note", "text"},
                  {"both", Value::Dict{{"x/../y", 1}, {"text", "x"}, {"a", 1}}},
                  {"list", Value::List{1}}},
                 3, {});
  }
  tracker->finish();
  const auto run = folder.path() / "project";
  const auto events = test::event_bytes(test::event_file(run));
  ASSERT_EQ(events.size(), 7U);
  EXPECT_EQ(ProtoReader(events[1]).message(5).message(1).text(1), "loss");
  EXPECT_EQ(ProtoReader(events[2]).message(5).message(1).real32(2), 1.0F);
  EXPECT_EQ(ProtoReader(events[3]).message(5).message(1).text(1), "note/text_summary");
  EXPECT_TRUE(fs::exists(run / "both_a"));
  ASSERT_EQ(log.messages().size(), 3U);  // once for each key
  EXPECT_TRUE(log.messages()[0].starts_with("The tracker tensorboard leaves out 'both/x/../y': "));
  EXPECT_TRUE(log.messages()[1].starts_with("The tracker tensorboard leaves out 'both/text': "));
  EXPECT_EQ(log.messages()[2],
            "The tracker tensorboard leaves out 'list': The value is a list. Expected a number, a "
            "text or a dict of numbers.");
  for (const auto& entry : fs::directory_iterator(run)) {
    if (!fs::exists(entry.path() / "hparams.yml")) continue;
    EXPECT_EQ(test::content_of(entry.path() / "hparams.yml"),
              "deep: true\nlr: 0.1\nname: a\nnone: null\n");
    EXPECT_EQ(test::event_bytes(test::event_file(entry.path())).size(), 4U);
    return;
  }
  FAIL() << "no hparams.yml";
}

TEST(TensorBoardTracker, KeepsValuesWhileTheDiskIsFull) {
  const test::Folder folder;
  const test::CapturedLog log;
  SummaryWriter writer(folder.path());
  const auto file = test::event_file(folder.path());
  fs::rename(file, folder / "aside");
  fs::create_symlink("/dev/full", file);
  for (int i = 0; i < 100; ++i) writer.add_scalar("loss", i, i);
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_EQ(log.messages()[0], "The tracker tensorboard cannot write: Cannot write '" +
                                   file.string() +
                                   "': No space left on device. Values are kept and written later; "
                                   "training goes on.");
  fs::rename(folder / "aside", file);
  writer.close();
  EXPECT_EQ(test::event_bytes(file).size(), 101U);
  EXPECT_EQ(log.messages().size(), 1U);
}

}  // namespace
}  // namespace accelerate
