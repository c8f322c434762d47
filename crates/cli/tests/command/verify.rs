//! `verify` and `info`.

use crate::common::{Files, run, run_logging};
use flash_sampling::reference::{Reference, Scheme};
use flash_sampling::{Head, PerturbedArgmax, Plan};
use flash_sampling_cli::interrupt::Interrupt;
use flash_sampling_cli::verify::Report;
use flash_sampling_conformance::{BuildError, Effort, SamplerFactory, laws};

const LAWS: [&str; 3] = ["tokens_follow_the_softmax", "winning_scores_are_gumbel", "ties_go_to_the_lower_token"];

#[test]
fn laws_that_hold_make_a_report_with_plots() {
    let files = Files::new();
    let page = files.name("report.html");
    let laws = LAWS.map(|law| format!("--law={law}"));
    let flags = ["verify", "--variant", "sharded", "--shards", "3", "--isa", "portable", "--report", &page];
    let result = run(&[&flags[..], &laws.each_ref().map(String::as_str)].concat());
    assert_eq!(result.code, 0, "{result:#?}");
    assert!(result.stdout.starts_with("cpu/sharded/portable on "), "{}", result.stdout);
    assert!(result.stdout.contains("alpha 1e-6") && result.stdout.ends_with("checks)\n"), "{}", result.stdout);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.matches("<svg").count() >= 2);
    assert!(page.contains("Gumbel Q-Q") && page.contains("Drawn over expected"));
    assert!(page.contains("<meta name=viewport") && page.contains("two standard deviations of it"));
    assert_eq!(page.matches("<figure>").count(), page.matches("<figcaption>").count());
    for outside in ["src=", "href=\"http", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    for law in LAWS {
        assert!(page.contains(law), "{law}");
    }
}

/// A sampler that never draws the last token of a head.
struct Forgetful;

impl SamplerFactory for Forgetful {
    fn name(&self) -> String {
        "broken/forgetful".into()
    }

    fn scheme(&self, _: &Head<'_>) -> Option<Scheme> {
        Some(Scheme::Tiled)
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let tokens = head.tokens();
        let head = if tokens.len() > 1 { head.slice(tokens.start..tokens.end - 1) } else { head };
        Ok(Box::new(Reference::new(head, plan, Scheme::Tiled)))
    }
}

#[test]
fn a_broken_sampler_is_found_out() {
    let laws: Vec<_> =
        ["tokens_follow_the_softmax", "noise_has_the_reference_bits"].map(|l| laws::named(l).unwrap()).into();
    let report = Report::make(&Forgetful, &laws, Effort::Quick, &Interrupt::default()).unwrap();
    assert!(!report.holds());
    assert!(report.verdicts.iter().any(|v| !v.holds));
}

#[test]
fn samplers_and_laws_that_are_not_there_are_refused() {
    run(&["verify", "--law", "nothing_ever_fails"]).assert_refused("known are noise_has_the_reference_bits");
    #[cfg(not(feature = "cuda"))]
    run(&["verify", "--backend", "cuda"]).assert_refused("this build has no feature 'cuda'");
    run(&["verify", "--shards", "3"]).assert_refused("--shards means nothing");
}

#[test]
fn laws_about_bits_count_what_differs() {
    let files = Files::new();
    let page = files.name("report.html");
    let result = run(&["verify", "--isa", "portable", "--law", "noise_matches_the_vectors", "--report", &page]);
    assert_eq!(result.code, 0, "{result:#?}");
    assert!(result.stdout.contains("1 check ") && result.stdout.contains(": 0 of 67 differ\n"), "{}", result.stdout);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains(">0 of 67 differ") && !page.contains("0.000000"), "{page}");
}

#[test]
fn effort_that_no_law_takes_is_told_of() {
    let told = |law: &str| run_logging("warn", &["verify", "--isa", "portable", "--effort", "full", "--law", law]);
    let none = told("wrong_shapes_are_errors");
    assert!(none.code == 0 && none.stderr.contains("--effort full changes nothing"), "{none:#?}");
    let some = told("lists_follow_plackett_luce");
    assert!(some.code == 0 && some.stderr.is_empty(), "{some:#?}");
}

#[test]
fn info_tells_kernels_and_what_was_looked_for() {
    let text = run(&["info"]);
    assert_eq!(text.code, 0);
    for says in
        ["instruction set    portable   available", "weight bf16 x hidden bf16", "libcuda.so.1", "looked for in"]
    {
        assert!(text.stdout.contains(says), "{says}: {}", text.stdout);
    }
    let json = run(&["info", "--format", "json"]).rows();
    assert_eq!(json[0]["kernels"].as_array().unwrap().len(), 9);
    assert_eq!(json[0]["machine"]["instruction_sets"][0], "portable");
}
