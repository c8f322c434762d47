//! `sample --backend cuda` on a GPU: equal to the CPU in every bit, since the products are exact.

use crate::common::{Files, bf16_bytes, run, run_on_gpus, values, with, words};
use flash_sampling::cuda::Device;
use flash_sampling_conformance::suite::runs;
use safetensors::tensor::Dtype;
use std::time::Instant;

/// The reason why ranks cannot run on this number of GPUs, with the features `mpi` and `nccl` if required.
fn unavailable(gpus: usize, mpi: bool, nccl: bool) -> Option<String> {
    let lacks = |feature| Some(format!("the command is built without the feature {feature}"));
    match Device::new(gpus - 1) {
        Err(error) => Some(error.to_string()),
        Ok(_) if mpi && cfg!(not(feature = "mpi")) => lacks("mpi"),
        Ok(_) if nccl && cfg!(not(feature = "nccl")) => lacks("nccl"),
        #[cfg(feature = "nccl")]
        Ok(_) if nccl && flash_sampling::cuda::nccl_version().is_none() => {
            Some("the library libnccl cannot be loaded".into())
        }
        Ok(_) => None,
    }
}

/// Small integers, whose products are exact.
fn integers(n: usize, seed: usize) -> Vec<f32> {
    values(n, seed).iter().map(|v| 8.0 * v).collect()
}

/// A file of `[5003, 64]`.
fn weight(files: &Files) -> String {
    let weight = [("w", Dtype::BF16, &[5003, 64][..], bf16_bytes(&integers(5003 * 64, 1)))];
    files.safetensors("w.safetensors", &weight)
}

/// A file of `[70, 64]`.
fn hidden(files: &Files) -> String {
    let hidden = [("h", Dtype::BF16, &[70, 64][..], bf16_bytes(&integers(70 * 64, 2)))];
    files.safetensors("h.safetensors", &hidden)
}

/// The arguments of `sample` for these files.
fn sample(weight: &str, hidden: &str) -> Vec<String> {
    words(&format!("sample --format json --weight {weight} --hidden {hidden}"))
}

#[test]
fn sample_on_a_gpu_gives_the_tokens_of_the_processor_for_the_same_seed() {
    if !runs("command/cuda", unavailable(1, false, false), 1) {
        return;
    }
    let files = Files::new();
    let (weight, of_bf16) = (weight(&files), hidden(&files));
    let of_f32 = files.npy("h.npy", &[70, 64], &integers(70 * 64, 2));
    for hidden in [of_bf16, of_f32] {
        let base = sample(&weight, &hidden);
        for flags in [
            "--seed 9 --temperature 300",
            "--seed 10 --temperature 500 --draws 20 --logprobs 3",
            "--temperature 0 --logprobs 2",
            "--seed 11 --temperature 400 --top-p 0.9 --top-k 30",
            "--seed 12 --temperature 400 --draws 4 --without-replacement",
            "--seed 14 --temperature 300 --canonical",
        ] {
            let [on_gpu, here] = ["cuda", "cpu"].map(|name| run(&with(&base, &format!("{flags} --backend {name}"))));
            assert_eq!((on_gpu.code, here.code), (0, 0), "{flags}: {on_gpu:#?} {here:#?}");
            assert!(!here.stdout.is_empty(), "{flags}");
            // Equal text also means equal scores and log-probabilities as printed.
            assert_eq!(on_gpu.stdout, here.stdout, "{flags}, hidden states of {hidden}");
        }
    }
}

/// Ranks on GPUs, in one process and under `mpirun` (feature `mpi`): one rank, two ranks on one GPU, and two ranks on
/// two GPUs by peers and by NCCL. If `FLASH_SAMPLING_REQUIRE` has a word of a case's name, a skip of the case is a
/// failure.
#[test]
fn sample_on_ranks_of_gpus_gives_the_tokens_of_the_processor() {
    let files = Files::new();
    let base = sample(&weight(&files), &hidden(&files));
    let cases = [
        ("command/one-gpu/cuda", 1, 1, "--transport peers"),
        ("command/gpus/peers", 2, 1, "--transport peers"),
        ("command/gpus/nccl", 2, 1, "--transport nccl"),
        ("command/one-gpu/mpi/peers", 1, 2, "--transport mpi --exchange peers"),
        ("command/gpus/mpi/peers", 2, 2, "--transport mpi --exchange peers"),
        ("command/gpus/mpi/nccl", 2, 2, "--transport mpi --exchange nccl"),
    ];
    let runs_here = |(name, gpus, processes, transport): &(&str, usize, usize, &str)| {
        runs(name, unavailable(*gpus, *processes > 1, transport.contains("nccl")), 1)
    };
    let cases: Vec<_> = cases.into_iter().filter(runs_here).collect();
    if cases.is_empty() {
        return;
    }
    // Several draws per row, whose log-probabilities need a separate call; and rows with filters.
    let flags =
        ["--seed 10 --temperature 500 --draws 7 --logprobs 3", "--seed 3 --temperature 400 --top-p 0.9 --top-k 30"];
    for flags in flags {
        let here = run(&with(&base, &format!("{flags} --backend cpu")));
        for (name, gpus, processes, transport) in &cases {
            let words = with(&base, &format!("{flags} --backend cuda --time-limit 10 {transport}"));
            let begun = Instant::now();
            let there = run_on_gpus(*gpus, *processes, &words);
            println!("{name}: {transport} took {:.1?}", begun.elapsed());
            assert_eq!((there.code, here.code), (0, 0), "{flags}, {transport}: {there:#?} {here:#?}");
            // With NCCL a logit is the score minus the noise, so it may differ by one rounding.
            let is_nccl = transport.contains("nccl");
            let is_same = there.tokens() == here.tokens() && (is_nccl || there.stdout == here.stdout);
            assert!(is_same && !here.stdout.is_empty(), "{flags}, {transport}");
        }
    }
}
