//! `sample --backend cuda` on a GPU: to the last bit what the processor draws, where the products are exact.

use crate::common::{Files, bf16_bytes, run, run_ranks, values, with};
use safetensors::tensor::Dtype;
use std::time::Instant;

/// Whether there is a GPU; where one is required it must be there.
fn runs() -> bool {
    let Err(error) = flash_sampling::cuda::Device::new(0) else { return true };
    let required = std::env::var("FLASH_SAMPLING_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == "cuda"), "FLASH_SAMPLING_REQUIRE names cuda: {error}");
    println!("skipped: {error}");
    false
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

/// The words of a command that draws from these files.
fn sample(weight: &str, hidden: &str) -> Vec<String> {
    ["sample", "--format", "json", "--weight", weight, "--hidden", hidden].map(str::to_owned).to_vec()
}

#[test]
fn sample_on_a_gpu_gives_the_tokens_of_the_processor_for_the_same_seed() {
    if !runs() {
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
            "--seed 13 --temperature 300 --variant grouped --group 64 --group-draw reuse",
            "--seed 14 --temperature 300 --canonical",
        ] {
            let [on_gpu, here] = ["cuda", "cpu"].map(|name| run(&with(&base, &format!("{flags} --backend {name}"))));
            assert_eq!((on_gpu.code, here.code), (0, 0), "{flags}: {on_gpu:#?} {here:#?}");
            assert!(!here.stdout.is_empty(), "{flags}");
            // Scores and log-probabilities too, as they are printed.
            assert_eq!(on_gpu.stdout, here.stdout, "{flags}, hidden states of {hidden}");
        }
    }
}

/// Ranks on GPUs, of one process and under `mpirun` (feature `mpi`): one alone, two on one GPU, and by peers and NCCL two where
/// there are so many.
#[test]
fn sample_on_ranks_of_gpus_gives_the_tokens_of_the_processor() {
    if !runs() {
        return;
    }
    let files = Files::new();
    let base = sample(&weight(&files), &hidden(&files));
    let [mpi, nccl] = [cfg!(feature = "mpi"), cfg!(feature = "nccl")];
    let two = flash_sampling::cuda::Device::new(1).is_ok();
    let ways = [
        (1, "--transport peers --world 1 --check-tokens", true),
        (1, "--transport peers --world 2 --check-tokens", two),
        (1, "--transport nccl --world 2", nccl && two),
        (2, "--transport mpi --exchange peers --devices 0,0 --check-tokens", mpi),
        (2, "--transport mpi --exchange peers --devices 1,0", mpi && two),
        (2, "--transport mpi --exchange nccl --check-tokens", mpi && nccl && two),
    ];
    // Rows of several draws, whose log-probabilities are told apart from them; and rows that are surveyed.
    let flags =
        ["--seed 10 --temperature 500 --draws 7 --logprobs 3", "--seed 3 --temperature 400 --top-p 0.9 --top-k 30"];
    for flags in flags {
        let here = run(&with(&base, &format!("{flags} --backend cpu")));
        for (processes, way, _) in ways.iter().filter(|(.., runs)| *runs) {
            let words = with(&base, &format!("{flags} --backend cuda --time-limit 10 {way}"));
            let begun = Instant::now();
            let there = if *processes > 1 { run_ranks(*processes, &words) } else { run(&words) };
            println!("{way} took {:.1?}", begun.elapsed());
            assert_eq!((there.code, here.code), (0, 0), "{flags}, {way}: {there:#?} {here:#?}");
            // By NCCL a logit is score minus noise, within a rounding of itself.
            let is_same = there.tokens() == here.tokens() && (way.contains("nccl") || there.stdout == here.stdout);
            assert!(is_same && !here.stdout.is_empty(), "{flags}, {way}");
        }
    }
}
