//! Tests of ranks in two processes, which connect through files in a folder.

use super::*;
use std::path::Path;

/// The environment variables for the rank of a child process and the folder of the group.
const CHILD: (&str, &str) = ("FLASH_SAMPLING_TEST_RANK", "FLASH_SAMPLING_TEST_FOLDER");

/// Ranks in two processes, which map each other's memory by the driver's handles: on two GPUs, or on one time-shared
/// GPU if there is only one.
#[test]
fn ranks_of_two_processes_have_the_best_draw_of_both_shards() {
    const WORLD: usize = 2;
    let [rank, folder] = [CHILD.0, CHILD.1].map(|name| std::env::var(name).ok());
    if let (Some(rank), Some(folder)) = (rank, folder) {
        return rank_of_a_process(rank.parse().unwrap(), WORLD, folder.as_ref());
    }
    let Some(devices) = placings(1).pop() else { return };
    drop(devices);
    let folder = std::env::temp_dir().join(format!("flash-sampling-peers-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (_, module) = module_path!().split_once("::").unwrap();
    let name = format!("{module}::ranks_of_two_processes_have_the_best_draw_of_both_shards");
    let start = |rank: usize| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &name, "--nocapture", "--test-threads", "1"]);
        command.env(CHILD.0, rank.to_string()).env(CHILD.1, &folder).spawn().unwrap()
    };
    let mut ranks: Vec<_> = (0..WORLD).map(start).collect();
    // A rank that misses another rank ends by its own timeout.
    let succeeded: Vec<_> = ranks.iter_mut().map(|rank| rank.wait().unwrap().success()).collect();
    let reports = (0..WORLD).filter(|rank| folder.join(format!("done-{rank}")).exists()).count();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!((succeeded, reports), (vec![true; WORLD], WORLD));
}

/// Runs the rank of a child process: draws, and reports success by a file.
fn rank_of_a_process(rank: usize, world: usize, folder: &Path) {
    let begun = Instant::now();
    // Writes this rank's message, and waits for the messages of all ranks.
    let all_gather = |what: &str, mine: &[u8]| -> Vec<Vec<u8>> {
        let (part, whole) = (folder.join(format!("part-{rank}")), folder.join(format!("{what}-{rank}")));
        std::fs::write(&part, mine).unwrap();
        std::fs::rename(part, whole).unwrap();
        let read = |other: usize| loop {
            match std::fs::read(folder.join(format!("{what}-{other}"))) {
                Ok(theirs) => break theirs,
                Err(error) => assert!(begun.elapsed() < 12 * LIMIT, "rank {other}: {error}"),
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        (0..world).map(read).collect()
    };
    let device = Device::new(rank).or_else(|_| Device::new(0)).unwrap();
    let endpoint = PeerEndpoint::new(rank, world, 64, &device).unwrap();
    let descriptors = all_gather("descriptor", &endpoint.descriptor());
    let counts: Vec<_> = (0..40).map(|step| [1, 64, 3, 17][step % 4]).collect();
    let mut rank = Rank::new(endpoint.connect(&descriptors, LIMIT).unwrap(), &counts);
    all_gather("connected", &[]);
    #[cfg(feature = "nccl")]
    by_nccl(&mut rank, world, all_gather);
    (0..counts.len()).for_each(|step| rank.launch(step));
    for (step, draws) in (0..).zip(rank.draws()) {
        let expected: Vec<_> = (0..draws.len()).map(|row| whole_draw(step, world, row)).collect();
        assert_eq!(draws, expected, "rank {}, step {step}", rank.peers.rank());
    }
    all_gather("done", &[]);
}

/// Exchanges four steps over NCCL if each rank has a GPU. Compares token and score: NCCL returns score minus noise as
/// logit, and synthetic draws have no noise.
#[cfg(feature = "nccl")]
fn by_nccl(rank: &mut Rank, world: usize, all_gather: impl Fn(&str, &[u8]) -> Vec<Vec<u8>>) {
    use crate::exchange::nccl::{NcclEndpoint, NcclId, is_present};
    if Device::new(world - 1).is_err() || !is_present() {
        let _ = writeln!(std::io::stderr(), "skipped: 1 test of cuda/nccl: no library, or no GPU for each process");
        return;
    }
    let (number, limit) = (rank.peers.rank(), 4 * LIMIT);
    let id = if number == 0 { NcclId::new().unwrap().as_bytes().to_vec() } else { Vec::new() };
    let id = NcclId::from_bytes(&all_gather("id", &id)[0]).unwrap();
    let mut nccl = NcclEndpoint::new(number, world, 64, rank.peers.device()).unwrap().connect(&id, limit).unwrap();
    for step in 0..4u32 {
        let (_, count) = rank.steps[1];
        let draws: Vec<_> = (0..count).map(|row| shard_draw(step, number, row)).collect();
        let held = rank.stream.clone_htod(&draws).unwrap();
        let (rows, draws) = (rank.rows_at, DeviceAddress::of(&held, &rank.stream));
        // SAFETY: rows and draws have this size and live until the wait has ended; one stream.
        unsafe { nccl.launch(&rank.stream, rows, draws, count) }.unwrap();
        nccl.wait(&rank.stream).unwrap();
        let found = rank.stream.clone_dtoh(&held).unwrap();
        rank.stream.synchronize().unwrap();
        for (row, found) in found.iter().enumerate() {
            let expected = whole_draw(step, world, row);
            let bits = |draw: &Draw| (draw.token, draw.score.to_bits(), draw.status);
            assert_eq!(bits(found), bits(&expected), "rank {number}, step {step}, row {row}, by NCCL");
        }
    }
}
