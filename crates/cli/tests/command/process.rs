//! The command among other processes: Ctrl-C, a reader that closes the output, and a short run of the benchmark.

use crate::common::{Files, assert_refusals, run, words};
use flash_sampling::{DType, Isa};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-sampling"));
    command.args(args).env("FLASH_SAMPLING_LOG", "off").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[cfg(unix)]
fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// Waits for the end; returns the exit code and the rest of standard error.
fn end(mut child: Child, mut stderr: impl Read) -> (Option<i32>, String) {
    let (status, mut text) = (child.wait().unwrap(), String::new());
    stderr.read_to_string(&mut text).unwrap();
    (status.code(), text)
}

/// Returns the exit code and the standard error of a run.
fn outcome(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_cleanly() {
    let mut child = command(&["sample", "--draws", "10000000"]).env("FLASH_SAMPLING_LOG", "info").spawn().unwrap();
    // The first note follows the installation of the signal handler.
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut String::new()).unwrap();
    interrupt(&child);
    assert_eq!(end(child, stderr), (Some(130), "error: interrupted\n".into()));
}

/// One call of a sampler does not check for the signal. It completes within a second without a note, or it is
/// interrupted.
#[test]
#[cfg(unix)]
fn ctrl_c_in_the_last_second_is_complete_or_interrupted() {
    let whole = command(&["sample"]).output().unwrap().stdout;
    for milliseconds in [0, 20, 100] {
        let mut child = command(&["sample"]).env("FLASH_SAMPLING_LOG", "info").spawn().unwrap();
        // The note about the head precedes the draws.
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        stderr.read_line(&mut String::new()).unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        interrupt(&child);
        let mut stdout = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
        match end(child, stderr) {
            (Some(0), stderr) => assert!(stderr.is_empty() && stdout == whole, "{milliseconds}: {stderr}"),
            (code, stderr) => assert_eq!((code, &*stderr), (Some(130), "error: interrupted\n"), "{milliseconds}"),
        }
    }
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_the_line_of_a_text() {
    let mut child = command(&["generate", "--num-sequences", "64", "--max-tokens", "500"]).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    // The line of the first seed, and part of its text.
    stdout.read_line(&mut text).unwrap();
    stdout.read_exact(&mut [0; 8]).unwrap();
    interrupt(&child);
    stdout.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(text.ends_with('\n'), "{text:?}");
}

/// 2000 draws of each row are one call of the reference, which takes minutes.
#[test]
#[cfg(unix)]
fn one_ctrl_c_ends_a_long_call() {
    for call in ["sample --draws 2000 --backend reference", "generate --num-sequences 4096"] {
        let mut child = command(&call.split(' ').collect::<Vec<_>>()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs(3));
        assert!(child.try_wait().unwrap().is_none(), "{call} is no long call");
        let signalled = Instant::now();
        interrupt(&child);
        let stderr = child.stderr.take().unwrap();
        let (code, stderr) = end(child, stderr);
        assert_eq!((code, stderr.lines().last()), (Some(130), Some("error: interrupted")), "{call}");
        assert!(signalled.elapsed() < Duration::from_secs(5), "{call}: {:?}", signalled.elapsed());
    }
}

#[test]
fn threads_that_nobody_means_are_refused() {
    for threads in ["99999", "-1", "many"] {
        let (code, stderr) = outcome(command(&["sample"]).env("RAYON_NUM_THREADS", threads));
        assert!(code == Some(2) && stderr.contains("RAYON_NUM_THREADS"), "{stderr}");
    }
}

/// The command detects mpirun by its environment variables.
#[test]
fn processes_of_mpirun_without_a_transport_get_one_warning() {
    let of = |launcher: &str, size: &str, rank: &str, args: &[&str]| {
        let mut command = command(args);
        let [of_size, of_rank] = ["SIZE", "RANK"].map(|what| format!("{launcher}_{what}"));
        let (code, stderr) = outcome(command.env("FLASH_SAMPLING_LOG", "warn").env(of_size, size).env(of_rank, rank));
        assert_eq!(code, Some(0), "{stderr}");
        stderr
    };
    let (sample, generate) = (&["sample"][..], &["generate", "--max-tokens", "2"][..]);
    for launcher in ["OMPI_COMM_WORLD", "PMI"] {
        for args in [sample, generate] {
            let warning = of(launcher, "4", "0", args);
            assert!(warning.lines().count() == 1 && warning.contains("mpirun started 4 processes"), "{warning}");
            assert_eq!(of(launcher, "4", "3", args), "");
            assert_eq!(of(launcher, "1", "0", args), "");
        }
        assert_eq!(of(launcher, "4", "0", &["info"]), "");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = command(&["sample", "--draws", "3000", "--format", "json"]).spawn().unwrap();
    drop(child.stdout.take());
    let stderr = child.stderr.take().unwrap();
    assert_eq!(end(child, stderr), (Some(0), String::new()));
}

#[test]
fn the_benchmark_leaves_a_table_and_a_record() {
    let files = Files::new();
    let json = files.name("record.json");
    let result = run(&["bench", "--quick", "--dtype", "f32", "--json", &json]);
    assert_eq!(result.code, 0, "{result:#?}");
    for says in [
        "of read",
        "/ greedy",
        "--quick: small heads and few rounds show that everything runs; the times mean nothing",
        "  of read      time of a plain read",
        "  / greedy     this time over",
        "tiled, gaussian",
        "online:512, peaked",
    ] {
        assert!(result.stdout.contains(says), "{says}: {}", result.stdout);
    }
    let best = Isa::best_for(DType::F32, DType::F32);
    for isa in Isa::available().into_iter().filter(|isa| isa.for_types(DType::F32, DType::F32) == *isa) {
        assert_eq!(result.stdout.contains(&format!("tiled, {isa}, peaked")), isa != best, "{isa}: {}", result.stdout);
    }
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(record["quick"], true);
    assert_eq!(record["sections"][0]["entries"][0]["name"], "read");
    assert!(record["sections"][1]["entries"][1]["best"].as_f64().unwrap() > 0.0);
    assert!(
        record["machine"]["processor"].is_string() && record["command"].as_str().unwrap().contains("bench --quick")
    );
}

#[test]
fn bad_sizes_of_a_benchmark_are_refused() {
    assert_refusals(
        &words("bench"),
        "
        --heads 0x8 => tokens x hidden size
        --heads 64,8 => tokens x hidden size
        --rows 1,0 => it must be 1 to 4096
        --rows a => 'a' for '--rows <A,B,...>': it must be 1 to 4096
        --rounds 0 => 1 to 10000
        --quick --backend cpu::0 => --backend: 0 threads
        --rows -1 => '-1' for '--rows
        --rows -1,2 => '-1' for '--rows
        --variants sharded => sharded:SHARDS
        --backend cuda:x => 'cuda:x' is no backend
        --quick --heads 64x8 => '--quick' cannot be used with '--heads 
        --quick --rows 2 => '--quick' cannot be used with '--rows 
        --quick --rounds 3 => '--quick' cannot be used with '--rounds ",
    );
}

#[test]
fn a_file_that_cannot_be_written_is_found_before_the_work() {
    let files = Files::new();
    let path = files.name("no/such/folder/file");
    let says = format!("cannot write {path}: No such file");
    run(&["bench", "--json", &path]).assert_refused(&says);
    // The check of the path precedes the laws, which take minutes.
    let start = std::time::Instant::now();
    run(&["verify", "--effort", "full", "--report", &path]).assert_refused(&says);
    assert!(start.elapsed().as_secs() < 20);
}

#[test]
#[cfg(target_os = "linux")]
fn an_output_without_room_is_refused_with_the_code_of_files() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (code, stderr) = outcome(command(&["info"]).stdout(full));
    assert!(code == Some(2) && stderr.starts_with("error: cannot write to standard output"), "{stderr}");
}

#[test]
#[cfg(target_os = "linux")]
fn notes_that_cannot_be_written_end_no_call() {
    for call in ["sample", "generate --max-tokens 2 --dry-base 2 --dry-multiplier 1 --top-k 4 --temperature 0"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let args: Vec<_> = call.split(' ').collect();
        let output = command(&args).env("FLASH_SAMPLING_LOG", "info").stderr(full).output().unwrap();
        assert!(output.status.code() == Some(0) && !output.stdout.is_empty(), "{call}: {:?}", output.status);
    }
}

#[test]
fn help_lists_the_exit_codes() {
    let help = run(&["sample", "--help"]);
    let text = help.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.code == 0 && text.contains("Exit codes: 0") && text.contains("130 Ctrl-C"), "{text}");
}
