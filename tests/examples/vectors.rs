//! Writes a file of `vectors/` from the scalar definitions, for the day that the noise gets a new version:
//! `cargo run --release -p flash-sampling-conformance --example vectors -- NAME > vectors/NAME.txt`, with NAME one of
//! `philox4x32`, `gumbel`, `noise`, `value_stability`.

use flash_sampling_conformance::data::hash;
use flash_sampling_conformance::laws::{scheme_name, stability_problem, stability_schemes};
use flash_sampling_core::noise::uniform::{TAIL_WORDS, exponential, gumbel};
use flash_sampling_core::reference::Reference;
use flash_sampling_core::{Domain, Noise, PerturbedArgmax, Plan, RowParams, Samples};

/// Random123's three cases for philox4x32-10 (zero, ones, pi), then blocks as the counter packs them.
fn philox() {
    println!("# philox4x32-10 in the format of Random123's kat_vectors: name rounds counter[4] key[2] result[4].");
    println!("# The first three are Random123's own known answers (Salmon et al. 2011).");
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344, 0xa409_3822, 0x299f_31d0];
    let mut cases = vec![[0u32; 6], [!0; 6], pi];
    for i in 0..13u64 {
        cases.push(core::array::from_fn(|j| hash(i, j as u64) as u32));
    }
    for [c0, c1, c2, c3, k0, k1] in cases {
        let r = rand_philox::philox4x32_10([c0, c1, c2, c3], [k0, k1]);
        let hex: Vec<String> = [c0, c1, c2, c3, k0, k1].iter().chain(&r).map(|w| format!("{w:08x}")).collect();
        println!("philox4x32 10 {}", hex.join(" "));
    }
}

/// Both ends, both guards, every power of two with its neighbours, and a stride.
fn gumbels() {
    println!("# word refinement exponential_bits gumbel_bits; the refinement matters for words below {TAIL_WORDS}.");
    let corners = (0..32u32).flat_map(|k| [(1u32 << k) - 1, 1 << k, (1 << k) + 1, !(1u32 << k)]);
    let tail = (0..TAIL_WORDS).step_by(37).chain([TAIL_WORDS - 1, TAIL_WORDS]);
    let stride = (0..200u32).map(|i| i.wrapping_mul(21_474_837));
    for word in corners.chain(tail).chain(stride).chain([0, !0]) {
        let refinements = if word < TAIL_WORDS { vec![0, 1, 0x8000_0000, 0xdead_beef, !0] } else { vec![0] };
        for r in refinements {
            let (e, g) = (exponential(word, || r), gumbel(word, || r));
            println!("{word:#010x} {r:#010x} {:#010x} {:#010x}", e.to_bits(), g.to_bits());
        }
    }
}

/// Ordinary noise, and the tokens below 4096 whose words are the smallest and the largest: a search of 2^26 words.
fn noise() {
    println!("# seed position draw token gumbel_bits: the noise of a token.");
    println!(
        "# The second half has words below {TAIL_WORDS}, which are refined, and words within {TAIL_WORDS} of 2^32."
    );
    let line = |seed: u64, position: u64, draw: u32, token: u32| {
        if let Some(noise) = Noise::new(seed, position) {
            let bits = noise.gumbel(Domain::Token, draw, token).to_bits();
            println!("{seed:#x} {position:#x} {draw:#x} {token} {bits:#010x}");
        }
    };
    for i in 0..32u64 {
        line(hash(1, i), hash(2, i) >> 8, hash(3, i) as u32, hash(4, i) as u32 % 4096);
    }
    let mut found = (0, 0);
    for position in 0..1 << 14 {
        let Some(noise) = Noise::new(2026, position) else { continue };
        for block in 0..1024 {
            for (token, word) in (4 * block..).zip(noise.words(Domain::Token, 0, block)) {
                let (low, high) = (word < TAIL_WORDS, word >= !TAIL_WORDS);
                if (low && found.0 < 6) || (high && found.1 < 6) {
                    found = (found.0 + u32::from(low), found.1 + u32::from(high));
                    line(2026, position, 0, token);
                }
            }
        }
    }
}

/// 24 tokens of each scheme.
fn value_stability() {
    println!("# scheme seed position draw token. Line i of a scheme draws from row i mod 8 of");
    println!("# Problem::integers(Size::new(8, 5003, 32), BF16, BF16, 2026) of the conformance suite.");
    let problem = stability_problem();
    for scheme in stability_schemes() {
        let plan = Plan { max_rows: 8, ..Plan::default() };
        let mut reference = Reference::new(problem.head(), plan, scheme.clone());
        for call in 0..3u64 {
            let rows: Vec<RowParams<'_>> = (0..8u64)
                .map(|r| RowParams {
                    seed: [42, hash(7, r)][(call > 0) as usize],
                    position: r + 8 * call,
                    first_draw: call as u32 / 2 * 5,
                    ..RowParams::default()
                })
                .collect();
            let mut out = Samples::new();
            reference.sample(problem.input(), &rows, &mut out).expect("the problem fits its plan");
            for (row, found) in rows.iter().zip(out.iter()) {
                let token = found.expect("the logits are finite").token();
                println!("{} {:#x} {} {} {token}", scheme_name(&scheme), row.seed, row.position, row.first_draw);
            }
        }
    }
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("philox4x32") => philox(),
        Some("gumbel") => gumbels(),
        Some("noise") => noise(),
        Some("value_stability") => value_stability(),
        _ => {
            eprintln!("usage: vectors philox4x32|gumbel|noise|value_stability");
            std::process::exit(2);
        }
    }
}
