//! The suite on ranks in processes, which exchange over MPI.
//!
//! This program starts itself under `mpirun` for some entries of [`SUITES`]. Arguments are words that select entries;
//! without arguments, each merge runs once, and the control. With the arguments `rank NAME`, the program is one rank.
//! All ranks run the same laws in the same order, each with its own shard of every head. The first rank with a broken
//! law prints it and exits, and `mpirun` ends the other ranks.

mod backends;

use backends::{Cpu, Kind, boxed, shard_plan, shard_starts};
use flash_sampling_conformance::{BuildError, SamplerFactory, laws, suite};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Head, PerturbedArgmax, Plan};
use flash_sampling_cpu::Isa;
use flash_sampling_distributed::{Mpi, ShardError, ShardMerge, ShardSampler, Transport, TransportError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode, Output};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The timeout of ranks. Between exchanges, each rank evaluates draws by itself, and ranks may be more than processors.
const LIMIT: Duration = Duration::from_secs(60);

/// The suite with a number of ranks. Four ranks have unequal shards, one of them empty.
#[derive(Clone, Copy, Debug)]
struct Suite {
    name: &'static str,
    world: usize,
    merge: ShardMerge,
}

const fn ranks(name: &'static str, world: usize, merge: ShardMerge) -> Suite {
    Suite { name, world, merge }
}

const SUITES: [Suite; 4] = [
    ranks("mpi/winners/2", 2, ShardMerge::Winners),
    ranks("mpi/log_mass/2", 2, ShardMerge::LogMass),
    ranks("mpi/winners/4", 4, ShardMerge::Winners),
    ranks("mpi/log_mass/4", 4, ShardMerge::LogMass),
];

/// The words that select entries without arguments.
const DEFAULT: [&str; 3] = ["winners/4", "log_mass/2", "control"];

/// The negative control: the last rank compares its draws with another variant, so one law is broken on this rank only.
const CONTROL: Suite = ranks("mpi/control", 4, ShardMerge::Winners);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, name] = args.as_slice()
        && word == "rank"
    {
        let suite = SUITES.into_iter().chain([CONTROL]).find(|suite| suite.name == name);
        return rank(suite.expect("a line of the table"));
    }
    let words = if args.is_empty() { DEFAULT.map(String::from).to_vec() } else { args };
    let is_chosen = |suite: &Suite| words.iter().any(|word| suite.name.contains(word.as_str()));
    let mut failed = 0;
    for suite in SUITES.into_iter().chain([CONTROL]).filter(is_chosen) {
        let begun = Instant::now();
        let output = match mpirun(&suite) {
            Ok(output) => output,
            Err(error) => {
                println!("mpirun cannot be started: {error}");
                return ExitCode::FAILURE;
            }
        };
        let text = String::from_utf8_lossy(&output.stdout);
        let held = text.lines().filter(|line| line.starts_with("held ")).count();
        let is_control = suite.name == CONTROL.name;
        let is_ok = match is_control {
            false => output.status.success() && held == suite.world,
            true => {
                let broken: Vec<_> = text.lines().filter(|line| line.contains(": broken: ")).collect();
                let last = format!("rank {}: ", suite.world - 1);
                let is_named = broken.len() == 1 && broken[0].starts_with(&last);
                !output.status.success() && held == 0 && is_named && begun.elapsed() < LIMIT
            }
        };
        let what = if is_control { "is rejected".into() } else { format!("{} laws", laws::ALL.len()) };
        let verdict = if is_ok { "ok" } else { "FAILED" };
        println!("test {} with {} ranks: {what} ... {verdict} ({:.1?})", suite.name, suite.world, begun.elapsed());
        if !is_ok {
            failed += 1;
            println!("{text}{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    println!("test result: {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Starts the ranks, which may be more than the processors.
fn mpirun(suite: &Suite) -> std::io::Result<Output> {
    Command::new("mpirun")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["--oversubscribe", "-n", &suite.world.to_string()])
        .arg(std::env::current_exe()?)
        .args(["rank", suite.name])
        .output()
}

/// Runs one rank of an entry, and prints `held` or the broken law.
fn rank(suite: Suite) -> ExitCode {
    let mpi = Mpi::start().expect("MPI starts").with_time_limit(LIMIT);
    let number = mpi.rank();
    assert_eq!(mpi.world(), suite.world);
    let factory = Ranks { suite, number, mpi: Shared(Arc::new(Mutex::new(mpi))) };
    for law in laws::ALL {
        let found = catch_unwind(AssertUnwindSafe(|| law.check(&suite::trial(&factory))));
        let why = match found {
            Ok(Ok(_)) => continue,
            Ok(Err(failure)) => failure.to_string(),
            Err(_) => "it panicked".into(),
        };
        println!("rank {number}: broken: {}: {why}", law.name);
        // Exits without a return, because an orderly end of MPI waits for the other ranks.
        std::process::exit(1);
    }
    println!("held by rank {number}");
    ExitCode::SUCCESS
}

/// The process's transport, shared by all samplers of the process, because MPI starts once per process.
#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<Mpi>>);

impl Shared {
    fn with<R>(&self, f: impl FnOnce(&mut Mpi) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Transport for Shared {
    fn rank(&self) -> usize {
        self.with(|mpi| mpi.rank())
    }

    fn world(&self) -> usize {
        self.with(|mpi| mpi.world())
    }

    fn time_limit(&self) -> Duration {
        self.with(|mpi| mpi.time_limit())
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.with(|mpi| mpi.set_time_limit(limit));
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        self.with(|mpi| mpi.all_gather(mine, all))
    }
}

/// A factory of this rank's sampler, over its shard of every head.
struct Ranks {
    suite: Suite,
    number: usize,
    mpi: Shared,
}

impl Ranks {
    fn starts(&self, head: &Head<'_>) -> Vec<u32> {
        shard_starts(head, (self.suite.world != 4).then_some(self.suite.world as u32))
    }
}

impl SamplerFactory for Ranks {
    fn name(&self) -> String {
        self.suite.name.into()
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        let is_control = self.suite.name == CONTROL.name && self.number == CONTROL.world - 1;
        match self.suite.merge {
            ShardMerge::Winners if !is_control => Some(ReferenceVariant::Tiled),
            _ => Some(ReferenceVariant::Sharded(self.starts(head))),
        }
    }

    fn pace(&self) -> usize {
        LOCAL.pace()
    }

    // The noise of shards depends on the rank, and the shards must cover the whole vocabulary.
    fn takes_shards(&self) -> bool {
        false
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let merge = self.suite.merge;
        let shard = head.split(&self.starts(&head)).swap_remove(self.number);
        let local = LOCAL.build(shard, shard_plan(merge, plan))?;
        let join = || -> Result<_, ShardError> { ShardSampler::new(local, self.mpi.clone(), merge)?.with_plan(plan) };
        boxed(join())
    }
}

/// The CPU's sampler of a shard, on one thread.
const LOCAL: Cpu = Cpu::new(Kind::Tiled, Isa::Portable).with_threads(1);
