//! Rows with filters on ranks in two processes, which exchange set-up data by files in a folder.

use super::filtered_rows::{TopPRows, histories, rows};
use super::rank_filters::decided_rows_are_same;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::{DType, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cuda::{CudaExchange, CudaTiled, Device, PeerEndpoint};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

const WORLD: usize = 2;
/// The environment variables of a process's rank, and of the folder of the ranks' files.
const CHILD: (&str, &str) = ("FLASH_SAMPLING_TEST_RANK", "FLASH_SAMPLING_TEST_FOLDER");
/// The timeout of an exchange on the GPU.
const LIMIT: Duration = Duration::from_secs(20);
/// The timeout of a file.
const MEET: Duration = Duration::from_secs(60);

/// Returns whether this process is a rank that [`draw_as_one_gpu`] started; if so, first runs the rank.
pub(crate) fn is_a_rank() -> bool {
    let [rank, folder] = [CHILD.0, CHILD.1].map(|name| env::var(name).ok());
    let (Some(rank), Some(folder)) = (rank, folder) else { return false };
    draw(rank.parse().unwrap(), folder.as_ref());
    true
}

/// Starts the ranks as processes that run only the test of this name, and waits for them.
pub(crate) fn draw_as_one_gpu(test: &str) {
    let folder = env::temp_dir().join(format!("flash-sampling-rank-filters-{}", process::id()));
    fs::create_dir(&folder).unwrap();
    let start = |rank: usize| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads", "1"]);
        command.env(CHILD.0, rank.to_string()).env(CHILD.1, &folder).spawn().unwrap()
    };
    let mut ranks: Vec<_> = (0..WORLD).map(start).collect();
    // A rank that waits for a missing rank ends at its timeout.
    let succeeded: Vec<_> = ranks.iter_mut().map(|rank| rank.wait().unwrap().success()).collect();
    let finished = (0..WORLD).filter(|rank| folder.join(format!("done-{rank}")).exists()).count();
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!((succeeded, finished), (vec![true; WORLD], WORLD));
}

/// Runs a rank, on its own GPU if there are two: compares its draws, and then writes a file.
fn draw(rank: usize, folder: &Path) {
    // Writes a file for the other ranks, and waits for the files of all ranks.
    let exchange_files = |what: &str, mine: &[u8]| -> Vec<Vec<u8>> {
        let begun = Instant::now();
        let (part, whole) = (folder.join(format!("part-{rank}")), folder.join(format!("{what}-{rank}")));
        fs::write(&part, mine).unwrap();
        fs::rename(part, whole).unwrap();
        let read = |other: usize| loop {
            match fs::read(folder.join(format!("{what}-{other}"))) {
                Ok(theirs) => break theirs,
                Err(error) => assert!(begun.elapsed() < MEET, "rank {other}: {error}"),
            }
            thread::sleep(Duration::from_millis(2));
        };
        (0..WORLD).map(read).collect()
    };
    let device = Device::new(rank).or_else(|_| Device::new(0)).unwrap();
    let plan = Plan { max_rows: 24, max_draws: 3, ..Plan::default() };
    let problem = Problem::gaussian(Size::new(24, 6000, 264), DType::BF16, DType::BF16, 5);
    let lists = histories();
    let calls = [
        (1, TopPRows::None),
        (24, TopPRows::None),
        (24, TopPRows::Bare),
        (24, TopPRows::Knobs),
        (24, TopPRows::Bias),
        (7, TopPRows::None),
    ];
    let calls: Vec<_> = calls.into_iter().map(|(count, mass)| (count, rows(count, mass, lists))).collect();
    let mut alone = CudaTiled::new(problem.head(), plan, &device).unwrap();
    let want = |(count, rows): &(usize, Vec<RowParams<'_>>)| {
        let mut out = Samples::new();
        alone.sample(problem.input().row_range(0..*count), rows, &mut out).unwrap();
        out
    };
    let want: Vec<_> = calls.iter().map(want).collect();
    let shard = problem.head().split(&[0, 2504]).swap_remove(rank);
    let mut sampler = CudaTiled::new(shard, plan, &device).unwrap();
    sampler.prepare_sharded().unwrap();
    let endpoint = PeerEndpoint::new(rank, WORLD, CudaTiled::max_exchange_rows(&plan), &device).unwrap();
    let descriptors = exchange_files("descriptor", &endpoint.descriptor());
    let mut exchange = CudaExchange::from(endpoint.connect(&descriptors, LIMIT).unwrap());
    exchange.agree(&exchange_files("support", &sampler.encode_support())).unwrap();
    let (mut found, mut open, mut left) = (Samples::new(), Vec::new(), 0);
    for ((count, rows), want) in calls.iter().zip(&want) {
        if device.capability().0 != 9 {
            assert!(!sampler.can_filter_sharded(&exchange, rows));
            continue;
        }
        assert!(sampler.can_filter_sharded(&exchange, rows));
        let input = problem.input().row_range(0..*count);
        sampler.sample_sharded(&mut exchange, input, rows, Some(&mut open), &mut found).unwrap();
        decided_rows_are_same(&found, want, &open, rows, &format!("rank {rank}, {count} rows"));
        left += open.len();
    }
    assert!(left <= 12, "{left} of 104 rows left open");
    exchange_files("done", &[]);
}
