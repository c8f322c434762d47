//! Tests of ranks on GPUs in processes, which exchange over MPI.
//!
//! This program starts itself under `mpirun` for each scenario, and checks the ranks' output. Arguments are words that
//! select scenarios. With the arguments `rank NAME`, it runs one rank. A scenario without enough GPUs is skipped,
//! unless `FLASH_SAMPLING_REQUIRE` has a word of its name.

#[path = "cuda/filtered_rows.rs"]
mod filtered_rows;
#[path = "cuda/mpi_ranks.rs"]
mod mpi_ranks;
#[allow(dead_code)] // its part
#[path = "backends/gpu_rows.rs"]
mod rows;
#[path = "cuda/same_draws.rs"]
mod same_draws;

use flash_sampling::GpuExchange;
use flash_sampling_conformance::suite::runs;
use flash_sampling_cuda::{CudaError, Device};
use std::process::{Command, ExitCode, Output};
use std::time::{Duration, Instant};

/// The timeout of ranks in scenarios with a failing rank.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

/// The time after which a hanging scenario is ended.
const MOST: Duration = Duration::from_secs(120);

/// The event of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The ranks draw like one GPU. Then one rank has another seed, which is the negative control.
    Draws,
    /// The signal kills or stops one rank between two calls.
    Signal(&'static str),
}

/// A number of ranks on one GPU, or on one GPU each, and an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) world: usize,
    pub(crate) exchange: GpuExchange,
    pub(crate) has_one_gpu: bool,
    pub(crate) event: Event,
}

const fn one(name: &'static str, world: usize, event: Event) -> Scenario {
    Scenario { name, world, exchange: GpuExchange::Peers, has_one_gpu: true, event }
}

const fn each(name: &'static str, world: usize, exchange: GpuExchange, event: Event) -> Scenario {
    Scenario { name, world, exchange, has_one_gpu: false, event }
}

const KILLED: Event = Event::Signal("-KILL");
const STOPPED: Event = Event::Signal("-STOP");

const SCENARIOS: [Scenario; 10] = [
    one("one-gpu/cuda/2/draws", 2, Event::Draws),
    one("one-gpu/cuda/3/killed", 3, KILLED),
    each("gpus/peers/2/draws", 2, GpuExchange::Peers, Event::Draws),
    each("gpus/peers/2/killed", 2, GpuExchange::Peers, KILLED),
    each("gpus/peers/2/stopped", 2, GpuExchange::Peers, STOPPED),
    each("gpus/peers/4/draws", 4, GpuExchange::Peers, Event::Draws),
    each("gpus/nccl/2/draws", 2, GpuExchange::Nccl, Event::Draws),
    each("gpus/nccl/2/killed", 2, GpuExchange::Nccl, KILLED),
    each("gpus/nccl/2/stopped", 2, GpuExchange::Nccl, STOPPED),
    each("gpus/nccl/4/draws", 4, GpuExchange::Nccl, Event::Draws),
];

impl Scenario {
    fn unavailable(&self) -> Option<String> {
        let last = if self.has_one_gpu { 0 } else { self.world - 1 };
        let missing = Device::new(last).err().map(|error: CudaError| error.to_string());
        let needs_nccl = self.exchange == GpuExchange::Nccl;
        let no_nccl = || "the library libnccl cannot be loaded".into();
        missing.or_else(|| (needs_nccl && flash_sampling_cuda::nccl_version().is_none()).then(no_nccl))
    }

    /// Returns the number of ranks that succeed.
    fn survivors(&self) -> usize {
        self.world - usize::from(self.event != Event::Draws)
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, name] = args.as_slice()
        && word == "rank"
    {
        let scenario = SCENARIOS.into_iter().find(|scenario| scenario.name == name);
        mpi_ranks::run(&scenario.expect("a scenario of the table"));
        return ExitCode::SUCCESS;
    }
    let is_chosen = |name: &str| args.is_empty() || args.iter().any(|word| name.contains(word.as_str()));
    let chosen: Vec<_> = SCENARIOS.iter().filter(|scenario| is_chosen(scenario.name)).collect();
    if chosen.is_empty() {
        println!("no scenario has one of the words {args:?} in its name");
        return ExitCode::FAILURE;
    }
    let (mut passed, mut failed) = (0, 0);
    for scenario in chosen {
        if !runs(scenario.name, scenario.unavailable(), 1) {
            continue;
        }
        let begun = Instant::now();
        let output = match mpirun(scenario) {
            Ok(output) => output,
            Err(error) => {
                println!("mpirun cannot be started: {error}");
                return ExitCode::FAILURE;
            }
        };
        let text = String::from_utf8_lossy(&output.stdout);
        let said: Vec<_> = text.lines().filter(|line| line.starts_with("ok ")).collect();
        // All processes must end; if all ranks should succeed, without an error.
        let (took, survivors) = (begun.elapsed(), scenario.survivors());
        let is_ended = took < MOST && (survivors < scenario.world || output.status.success());
        let is_ok = said.len() == survivors && is_ended;
        let verdict = if is_ok { "ok" } else { "FAILED" };
        println!("test {} ... {verdict} ({took:.1?}, mpirun: {})", scenario.name, output.status);
        said.iter().for_each(|line| println!("  {line}"));
        if is_ok {
            passed += 1;
        } else {
            failed += 1;
            println!("{text}{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    println!("test result: {passed} passed; {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Starts the ranks, which may be more than the processors. `mpirun` ends ranks that hang. If a rank is killed or
/// stopped, the other ranks continue, and the exit status says nothing about them.
fn mpirun(scenario: &Scenario) -> std::io::Result<Output> {
    let recovery = ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"];
    let flags = if scenario.event == Event::Draws { &[][..] } else { &recovery };
    Command::new("mpirun")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(flags)
        .args(["--oversubscribe", "--timeout", &MOST.as_secs().to_string(), "-n", &scenario.world.to_string()])
        .arg(std::env::current_exe()?)
        .args(["rank", scenario.name])
        .output()
}
