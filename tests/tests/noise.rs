//! The scalar noise against the vectors, and its law driven without a sampler.

use flash_sampling_conformance::noise_map::{self, Version1};
use flash_sampling_conformance::vectors::{self, lines, number};
use flash_sampling_conformance::{Effort, LawFailure};
use flash_sampling_core::noise::uniform::{exponential, gumbel};
use flash_sampling_core::{Domain, Noise};

#[test]
fn philox_gives_the_known_answers() {
    let mut seen = 0;
    for fields in lines(vectors::PHILOX) {
        assert_eq!(fields[..2], ["philox4x32", "10"]);
        let words: Vec<u32> = fields[2..].iter().map(|w| u32::from_str_radix(w, 16).expect("hexadecimal")).collect();
        let found = rand_philox::philox4x32_10([words[0], words[1], words[2], words[3]], [words[4], words[5]]);
        assert_eq!(found, words[6..], "{fields:?}");
        seen += 1;
    }
    assert!(seen >= 16);
}

#[test]
fn words_become_the_exponentials_and_gumbels_of_the_vectors() {
    let mut seen = 0;
    for fields in lines(vectors::GUMBEL) {
        let [word, refinement, e, g] = [0, 1, 2, 3].map(|i| number(fields[i]) as u32);
        assert_eq!(exponential(word, || refinement).to_bits(), e, "exponential of {word:#x}, {refinement:#x}");
        assert_eq!(gumbel(word, || refinement).to_bits(), g, "Gumbel of {word:#x}, {refinement:#x}");
        seen += 1;
    }
    assert!(seen > 300);
}

#[test]
fn tokens_have_the_noise_of_the_vectors() {
    let mut rare = 0;
    for fields in lines(vectors::NOISE) {
        let [seed, position, draw, token, bits] = [0, 1, 2, 3, 4].map(|i| number(fields[i]));
        let noise = Noise::new(seed, position).expect("a valid position");
        assert_eq!(u64::from(noise.gumbel(Domain::Token, draw as u32, token as u32).to_bits()), bits, "{fields:?}");
        let word = noise.word(Domain::Token, draw as u32, token as u32);
        rare += u32::from(!(256..=u32::MAX - 256).contains(&word));
    }
    assert!(rare >= 8, "the file holds refined words");
}

#[test]
fn noise_reaches_into_the_tail() -> Result<(), LawFailure> {
    println!("{}", noise_map::check(&Version1, Effort::Quick, &|_| ())?);
    Ok(())
}
