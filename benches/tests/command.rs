//! The program as a process: small runs, and flags that it refuses.

use std::process::{Command, Output};

fn run(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-sampling-bench"));
    command.args(args.split(' ')).output().unwrap()
}

/// The table and the record of a small run.
fn quick(benchmark: &str) -> (String, serde_json::Value) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("record.json");
    let output = run(&format!("{benchmark} --quick --dtype f32 --json {}", json.display()));
    assert!(output.status.success(), "{output:?}");
    (String::from_utf8(output.stdout).unwrap(), serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap())
}

#[test]
fn variants_and_draws_from_logits_leave_a_table_and_a_record() {
    let (table, record) = quick("cpu");
    for says in ["tiled, gaussian", "online:512, peaked", "standalone, peaked", "top-p 0.95"] {
        assert!(table.contains(says), "{says}: {table}");
    }
    assert_eq!(record["sections"][2]["what"], "draw from logits");
}

#[test]
fn filters_leave_times_and_passes_of_every_case() {
    let (table, record) = quick("cpu --filters");
    for says in [
        "/ plain",
        "the times mean nothing",
        "  one pass         share",
        "top-k 50, top-p 0.9",
        "penalties, 1000 tokens",
        "LLM-like",
        "best in one tile",
    ] {
        assert!(table.contains(says), "{says}: {table}");
    }
    assert_eq!(record["sections"][0]["entries"].as_array().unwrap().len(), 7);
    // A warm-up call and two rounds of one row.
    assert_eq!(record["sections"][0]["entries"][4]["passes"]["rows"], 3);
}

#[test]
fn filters_with_a_shadow_have_a_section_of_their_own_with_the_times_without_as_peers() {
    let (table, record) = quick("cpu --filters --shadow");
    let sections = record["sections"].as_array().unwrap();
    let names =
        |kind: &str| sections[1][kind].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap().to_owned());
    assert_eq!(sections[1]["what"], "fused pipeline with a shadow, LLM-like rows");
    assert!(names("peers").eq(names("entries").map(|name| format!("without a shadow: {name}"))), "{table}");
    assert!(table.contains("of ours"), "{table}");
}

#[test]
#[cfg(feature = "cuda")]
fn sizes_that_the_fused_kernel_does_not_take_are_refused() {
    for (args, says) in [
        ("gpu --rows 1,257", "at most 256"),
        ("gpu --heads 64x9", "multiple of 8"),
        ("ranks --dtype f32", "bf16 and f16"),
        ("ranks --rounds 5", "--rounds means nothing"),
        ("gpu --filters --portable", "cannot be used with"),
    ] {
        let output = run(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(says), "{args}: {error}");
    }
}
