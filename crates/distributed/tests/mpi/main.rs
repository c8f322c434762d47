//! Ranks as processes.
//!
//! Without arguments this program starts itself under `mpirun`, once for each scenario and world, and checks the output
//! of the ranks. With `rank SCENARIO` it is one of these ranks.

mod ranks;

use std::process::{Command, ExitCode, Output};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The time limit of the ranks in scenarios with a failure.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);

/// The longest time of a scenario, also on busy processors: the time limits must prevent a hang.
const END: Duration = Duration::from_secs(60);

/// The number of scenarios that run at the same time. Their ranks mostly wait.
const PARALLEL: usize = 3;

/// A scenario, its world, and its number of lines with `ok`.
const SCENARIOS: &[(&str, usize, usize)] = &[
    ("agree", 2, 2),
    ("agree", 4, 4),
    ("differ", 2, 2),
    ("differ", 4, 4),
    ("killed-before-handshake", 2, 1),
    ("killed-before-handshake", 4, 3),
    ("killed-in-handshake", 2, 1),
    ("killed-in-handshake", 4, 3),
    ("killed-before-draw", 2, 1),
    ("killed-before-draw", 4, 3),
    ("stopped-before-handshake", 2, 1),
    ("stopped-before-handshake", 4, 3),
    ("stopped-in-handshake", 2, 1),
    ("stopped-in-handshake", 4, 3),
    ("killed-near-timeout", 4, 3),
    ("stopped-near-timeout", 4, 3),
    ("stopped-in-long-message", 4, 3),
    ("stopped-beside-late-rank", 4, 3),
    ("late-long-message", 4, 4),
    ("stopped-before-draw", 2, 1),
    ("stopped-before-draw", 4, 3),
    ("stopped-before-idle-ranks", 4, 3),
    ("stopped-before-next-exchange", 4, 3),
    ("ended-in-order", 2, 2),
    ("ended-in-order", 4, 4),
    ("timed", 4, 4),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, rank, scenario] = args.as_slice()
        && rank == "rank"
    {
        ranks::run(scenario);
        return ExitCode::SUCCESS;
    }
    let next = AtomicUsize::new(0);
    let failed = || {
        std::iter::from_fn(|| SCENARIOS.get(next.fetch_add(1, Relaxed)))
            .filter(|&&(scenario, world, ok)| !passes(scenario, world, ok))
            .count()
    };
    let failed: usize = std::thread::scope(|scope| {
        let threads = [(); PARALLEL].map(|()| scope.spawn(failed));
        threads.into_iter().map(|thread| thread.join().expect("scenarios do not panic")).sum()
    });
    println!("test result: {} passed; {failed} failed", SCENARIOS.len() - failed);
    ExitCode::from(u8::from(failed > 0))
}

/// Runs a scenario, prints its result, and returns whether it passes.
fn passes(scenario: &str, world: usize, ok: usize) -> bool {
    let begun = Instant::now();
    let output = match mpirun(scenario, world) {
        Ok(output) => output,
        Err(error) => {
            println!("mpirun cannot be started: {error}");
            return false;
        }
    };
    let (text, took) = (String::from_utf8_lossy(&output.stdout), begun.elapsed());
    let is_ok = text.lines().filter(|line| line.starts_with("ok ")).count() == ok && took < END;
    let mut report =
        format!("test {scenario} with {world} ranks ... {} ({took:.1?})", if is_ok { "ok" } else { "FAILED" });
    for line in text.lines().filter(|line| line.starts_with("time ")) {
        report += &format!("\n  {line}");
    }
    let named = text.lines().filter_map(|line| line.strip_prefix("named after ")?.parse().ok());
    if let Some(last) = named.reduce(f64::max) {
        report += &format!("\n  named at most {last:.3} s after the limit");
    }
    if !is_ok {
        report += &format!("\n{text}{}", String::from_utf8_lossy(&output.stderr));
    }
    println!("{report}");
    is_ok
}

/// Starts the ranks. There may be more ranks than processors, and a rank that dies does not end the others.
///
/// `mpirun` ends all ranks some time after the longest time of a scenario, because the library's own waits have no
/// limit.
fn mpirun(scenario: &str, world: usize) -> std::io::Result<Output> {
    let (world, seconds) = (world.to_string(), (END + 10 * LIMIT).as_secs().to_string());
    // In algorithm 2, ranks pass on what they received, so a rank that dies in the handshake delays some of the others.
    // In algorithm 1, each rank sends its block to all others at once, so the second part of a message shows a rank
    // that stops.
    let algorithm = if scenario.ends_with("-long") { "1" } else { "2" };
    let gathers = ["--mca", "coll_libnbc_iallgather_algorithm", algorithm];
    Command::new("mpirun")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["--oversubscribe", "--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"])
        .args(gathers.iter().filter(|_| scenario.ends_with("-within") || scenario.ends_with("-long")))
        .args(["--timeout", &seconds, "-n", &world])
        .arg(std::env::current_exe()?)
        .args(["rank", scenario])
        .output()
}
