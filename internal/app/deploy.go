package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"

	"github.com/culprit-project/culprit/deploy"
)

// DeployKubernetes prints a job of workers, or has kubectl apply it.
func DeployKubernetes(ctx context.Context, o deploy.KubernetesOptions, apply bool, out io.Writer, progress Output) error {
	text, err := deploy.Kubernetes(o)
	if err != nil {
		return &UsageError{err}
	}
	if !apply {
		return print(out, text)
	}
	return hand(ctx, text, progress, "kubectl", "apply", "-f", "-")
}

// DeploySlurm prints a script of workers, or has sbatch take it.
func DeploySlurm(ctx context.Context, o deploy.SlurmOptions, apply bool, out io.Writer, progress Output) error {
	text, err := deploy.Slurm(o)
	if err != nil {
		return &UsageError{err}
	}
	if !apply {
		return print(out, text)
	}
	return hand(ctx, text, progress, "sbatch")
}

func print(out io.Writer, text string) error {
	_, err := io.WriteString(out, text)
	return err
}

// hand gives a text to a program and shows what it says.
func hand(ctx context.Context, text string, progress Output, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(text)
	said, err := cmd.CombinedOutput()
	what := strings.Join(append([]string{name}, args...), " ")
	if errors.Is(err, exec.ErrNotFound) {
		return usage("--apply: there is no %s here: run this without --apply where there is one, and hand it the text", name)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", what, err, strings.TrimSpace(string(said)))
	}
	progress.Progress.Printf("%s\n", strings.TrimSpace(string(said)))
	return nil
}
