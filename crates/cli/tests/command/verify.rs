//! `verify` and `info`.

use crate::common::{Files, has_cuda, run, run_logging};
use flash_sampling::reference::{Reference, ReferenceVariant};
use flash_sampling::{DType, Head, Isa, PerturbedArgmax, Plan};
use flash_sampling_cli::interrupt::Interrupt;
use flash_sampling_cli::verify::Report;
use flash_sampling_conformance::{BuildError, Effort, SamplerFactory, laws};

const LAWS: [&str; 3] = ["tokens_follow_the_softmax", "winning_scores_are_gumbel", "ties_go_to_the_lower_token"];

#[test]
fn laws_that_hold_make_a_report_with_plots() {
    let files = Files::new();
    let page = files.name("report.html");
    let laws = LAWS.map(|law| format!("--law={law}"));
    let flags = ["verify", "--variant", "sharded:3", "--backend", "cpu:portable", "--report", &page];
    let result = run(&[&flags[..], &laws.each_ref().map(String::as_str)].concat());
    assert_eq!(result.code, 0, "{result:#?}");
    assert!(result.stdout.starts_with("cpu/sharded:3/portable on "), "{}", result.stdout);
    assert!(result.stdout.contains("alpha 1e-6") && result.stdout.ends_with("checks)\n"), "{}", result.stdout);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.matches("<svg").count() >= 2);
    assert!(page.contains("Gumbel Q-Q") && page.contains("Drawn over expected"));
    assert!(page.contains("<meta name=viewport") && page.contains("two standard deviations"));
    // For a single decade of probabilities the page has a sentence. No placeholder of the template remains.
    assert!(page.contains(" draws; the law expects ") && !page.contains("{laws}") && !page.contains("{sampler}"));
    assert!(page.contains("text-align: right; white-space: nowrap"), "numbers are aligned and limits do not wrap");
    assert_eq!(page.matches("<figure>").count(), page.matches("<figcaption>").count());
    for outside in ["src=", "href=\"http", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    for law in LAWS {
        assert!(page.contains(law), "{law}");
    }
}

#[test]
fn the_report_begins_with_the_instruction_sets() {
    for isa in Isa::available() {
        let report = run(&["verify", "--backend", &format!("cpu:{isa}"), "--law", LAWS[2]]).stdout;
        let name = match isa.for_types(DType::F32, DType::F32) {
            of_f32 if of_f32 == isa => format!("cpu/tiled/{isa} on "),
            of_f32 => format!("cpu/tiled/{isa} ({of_f32} for types other than bf16) on "),
        };
        assert!(report.starts_with(&name), "{report}");
    }
}

/// A sampler that never draws the last token of a head.
struct Forgetful;

impl SamplerFactory for Forgetful {
    fn name(&self) -> String {
        "broken/forgetful".into()
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(ReferenceVariant::Tiled)
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let tokens = head.tokens();
        let head = if tokens.len() > 1 { head.slice(tokens.start..tokens.end - 1) } else { head };
        Ok(Box::new(Reference::new(head, plan, ReferenceVariant::Tiled)))
    }
}

#[test]
fn a_broken_sampler_fails() {
    let laws: Vec<_> =
        ["tokens_follow_the_softmax", "noise_has_the_reference_bits"].map(|l| laws::named(l).unwrap()).into();
    let report = Report::make(&Forgetful, &laws, Effort::Quick, &Interrupt::default()).unwrap();
    assert!(!report.holds());
    assert!(report.verdicts.iter().any(|v| !v.holds));
}

#[test]
fn unknown_laws_and_missing_samplers_are_refused() {
    let unknown = run(&["verify", "--law", "nope"]);
    unknown.assert_refused("'nope' for '--law <NAME>': no such law; `verify --help` lists all");
    assert!(unknown.stderr.len() < 120, "{}", unknown.stderr);
    run(&["verify", "--law", "tokens_follow_softmax"]).assert_refused("did you mean 'tokens_follow_the_softmax'?");
    let help = run(&["verify", "--help"]).stdout;
    assert!(laws::ALL.iter().all(|law| help.contains(law.name)), "{help}");
    if !has_cuda() {
        run(&["verify", "--backend", "cuda"]).assert_refused("this build has no feature 'cuda'");
    }
}

#[test]
fn laws_about_bits_count_what_differs() {
    let files = Files::new();
    let page = files.name("report.html");
    let result = run(&["verify", "--backend", "cpu:portable", "--law", "noise_matches_the_vectors", "--report", &page]);
    assert_eq!(result.code, 0, "{result:#?}");
    assert!(result.stdout.contains("1 check ") && result.stdout.contains(": 0 of 67 differ\n"), "{}", result.stdout);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<td colspan=4>0 of 67 differ") && !page.contains("0.000000"), "{page}");
}

#[test]
fn effort_without_effect_is_a_warning() {
    let warnings =
        |law: &str| run_logging("warn", &["verify", "--backend", "cpu:portable", "--effort", "full", "--law", law]);
    let none = warnings("wrong_shapes_are_errors");
    assert!(none.code == 0 && none.stderr.contains("--effort full has no effect"), "{none:#?}");
    let some = warnings("lists_follow_plackett_luce");
    assert!(some.code == 0 && some.stderr.is_empty(), "{some:#?}");
}

#[test]
fn info_lists_instruction_sets_and_the_gpu() {
    let text = run(&["info"]);
    assert_eq!(text.code, 0);
    for says in ["instruction set    portable   available", "weight bf16 x hidden bf16", "\ncuda  "] {
        assert!(text.stdout.contains(says), "{says}: {}", text.stdout);
    }
    assert!(text.stdout.lines().all(|line| line.split_whitespace().count() > 1), "{}", text.stdout);
    #[cfg(target_arch = "x86_64")]
    assert!(text.stdout.contains("\nAMX                the processor "), "{}", text.stdout);
    let json = run(&["info", "--format", "json"]).rows();
    assert_eq!(json[0]["kernels"].as_array().unwrap().len(), 9);
    assert_eq!(json[0]["machine"]["instruction_sets"][0], "portable");
}
